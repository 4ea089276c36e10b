"""Words and sentences that training prompts are put together from. Data only."""


def _items(text: str) -> tuple[str, ...]:
    return tuple(" ".join(item.split()) for item in text.split(";"))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


TOPICS = _items("""
    growing herbs on a balcony; cooking rice; making coffee at home; learning to swim; saving
    electricity; keeping bees; the causes of the French Revolution; how rainbows form; the water cycle;
    black holes; how vaccines work; the human heart; healthy breakfasts; back pain from sitting;
    stretching after sport; falling asleep faster; drinking enough water; writing a CV; asking for a
    raise; working from home; leading a meeting; resolving a conflict in a team; time management;
    planning a wedding on a small budget; moving to a new city; travelling by train through Europe;
    packing for a hike; camping with a family; choosing a backpack; visiting Japan for the first time;
    learning Spanish; learning to read music; playing the guitar; painting with watercolours; taking
    better photographs; knitting a scarf; building a bookshelf; repairing a leaking tap; cleaning an
    oven; removing stains from a carpet; organising a small kitchen; composting; pruning roses; raising
    chickens; training a puppy; adopting a cat; feeding birds in winter; keeping an aquarium; the
    history of the printing press; the Roman Empire; the Silk Road; the moon landing; the invention of
    the telephone; ancient Egypt; the Vikings; the Industrial Revolution; how elections work; what a
    parliament does; human rights; climate change; renewable energy; electric cars; recycling plastic;
    saving water in the garden; ocean currents; earthquakes; thunderstorms; how aeroplanes fly; how a
    refrigerator works; how batteries store energy; magnets; prime numbers; percentages; the Pythagorean
    theorem; probability; reading a graph; mental arithmetic; negative numbers; compound interest;
    opening a bank account; paying off debt; insurance; investing for beginners; taxes for freelancers;
    starting a small business; opening a café; selling handmade things; writing a business plan;
    marketing on social media; customer service; choosing a laptop; backing up files; strong passwords;
    phishing; what the cloud is; artificial intelligence; how search engines work; how the internet
    works; open source software; operating systems; what an algorithm is; databases; teenagers and
    phones; helping a child with homework; bedtime stories; picky eaters; starting kindergarten; being a
    good friend; making new friends as an adult; dealing with stress; meditation; keeping a journal;
    setting goals; breaking a bad habit; public libraries; museums; classical music; jazz; Shakespeare;
    detective novels; science fiction films; modern art; architecture; football rules; tennis; yoga;
    cycling to work; lifting weights; climbing; table tennis; sailing; ice skating; running shoes;
    Italian cooking; vegetarian meals; baking a chocolate cake; soups for winter; sharp cheese; spices;
    making jam; fermenting cabbage; the planets; the speed of light; photosynthesis in seaweed; the
    immune system; DNA; dinosaurs; whales; ants; migration of birds; rain forests; deserts; mountains;
    rivers; volcanic islands; glaciers of the past; maps and compasses; time zones; calendars
""")

QUESTIONS = (
    "What should a beginner know about {topic}?",
    "Explain {topic} to me in simple words.",
    "Explain {topic} to a child of eight.",
    "Give me {n} tips about {topic}.",
    "What are the most common mistakes with {topic}?",
    "Write a short text about {topic}, {form}.",
    "I am interested in {topic}. Where do I start?",
    "What is the connection between {topic} and {other}?",
    "Compare {topic} and {other}.",
    "Summarise what is known about {topic} in {n} sentences.",
    "What are the advantages and disadvantages of {topic}?",
    "Can you help me with {topic}? I have little time and little money.",
    "Make a plan for a week to learn about {topic}.",
    "Write an email to a friend who asked me about {topic}.",
    "Write {n} questions and answers for a quiz about {topic}.",
    "Why does {topic} matter?",
    "Tell me {n} surprising facts about {topic}.",
    "My friend says that {topic} is a waste of time. What could I answer?",
    "Give me a list of {n} things that I need for {topic}.",
    "How has {topic} changed over the last hundred years?",
    "Write a short introduction to {topic} for a newsletter.",
    "Teach me about {topic}, step by step.",
    "What would an expert say about {topic}?",
    "Write a polite letter to my town's mayor about {topic}.",
    "Hello! I have a question about {topic}. What is the first thing to look at?",
    "Describe {topic} {form}.",
    "Is {topic} difficult? Be honest, and say why.",
    "Write a conversation between a teacher and a student about {topic}.",
    "What words should I know when I read about {topic}? Explain {n} of them.",
    "I wrote a talk about {topic}. Suggest {n} titles and an opening sentence.",
    "How do {topic} and {other} differ? Answer in a table.",
    "Write a product description that has to do with {topic}.",
)

FORMS = (
    "as a numbered list",
    "in two paragraphs",
    "in one sentence",
    "for somebody in a hurry",
    "with an example",
    "in a friendly tone",
    "in a formal tone",
    "with headings",
    "with the pros and the cons",
    "as bullet points",
)

PROSE_FORMS = (
    "Write a story about {figure} who {turn}.",
    "Write a short story that begins in {place}, with {figure} and a {thing}.",
    "Tell a fairy tale about {figure} and a {thing}.",
    "Write a poem about a {thing} in {place}.",
    "Describe {place} as {figure} sees it.",
    "Write a letter from {figure} to a friend, in which a {thing} is mentioned.",
    "Write a diary entry of {figure} who {turn}.",
    "Write a dialogue between {figure} and a stranger in {place}.",
    "Begin a novel in which {figure} {turn}.",
    "Write the last scene of a play in {place}: {figure} {turn}.",
    "Write a funny story about {figure}, a {thing} and a misunderstanding.",
    "Describe a {thing} so that a reader can smell and hear it.",
    "Write a sad story that ends well, about {figure} in {place}.",
    "Invent a legend about a {thing} that lies in {place}.",
    "Write a speech of {figure} who {turn}.",
    "Continue this beginning: In {place} there was a {thing} that nobody wanted to touch.",
    "Continue this beginning: When {figure} came home, the {thing} was gone.",
)

PROSE_FIGURES = _items("""
    a retired ferryman; a young queen; a baker; a thief; an old soldier; a girl with a paper crown; a
    night nurse; a gardener; a translator; two sisters; a fisherman's son; a carpenter; a blind painter;
    a chess player; a spy; a cartographer; a robot; a postman; an astronaut; a judge; a shepherd; a
    pianist without a piano; a ghost; a fox; a crow; a very small dragon; a student; a grandmother; a
    tailor; a taxi driver; a beekeeper; a librarian; a doctor in a village; a sculptor; a widow; a boy
    who never speaks; an inventor; a dancer; a mountain guide; a smuggler; a cat; a miller; a clown; a
    miner; a prophet
""")

PROSE_TURNS = _items("""
    finds a key that fits every door; has to choose between two homes; keeps a secret for forty years;
    loses a bet; learns to whistle; waits for rain; buys a house at the end of the world; forgets a
    name; follows a sound into the woods; returns to the place of a crime; gets a letter that was meant
    for somebody else; misses the last ship; tells a lie that comes true; builds a boat on a hill; wakes
    up in another century; meets an old enemy; paints a wall at night; hides a child; must leave before
    the morning; refuses to sign; hears music from an empty room; wins a garden in a game of cards;
    discovers that the river runs backwards; walks across a country; cannot stop counting; repairs what
    others break; sells the family's silver; learns the language of birds; plants a tree for every year;
    gives a party to which nobody comes
""")

PLACES = _items("""
    a railway station; an island; a kitchen; the old library; a mountain hut; a market square; a
    greenhouse; a ruined castle; a hospital; a ship; a small town; a bakery; a cellar; a theatre; a
    forest; a hotel by the sea; a school; a prison; an abandoned mine; a monastery; a farm; a garden; a
    courtroom; a bookshop; a workshop; a vineyard; a lift; a tent; a palace; a swamp
""")

THINGS = _items("""
    lantern; violin; red coat; mirror; clock; silver spoon; suitcase; bicycle; photograph; stone; kite;
    candle; typewriter; umbrella; ring; telescope; bowl; feather; ladder; bell; carpet; map case; ship
    in a bottle; wooden horse; teacup; knife; drum; lamp; notebook; chair; barrel; coin; blanket; door;
    wheel; rope; apple; pumpkin; hammer; basket; window; shoe; flute; jar; box
""")

NAMES = _words("""
    Alice Bruno Clara Daniel Elena Felix Greta Hugo Irene Jakob Karin Leo Martha Nils Olga Paul Quentin
    Rosa Stefan Tina Ulrich Vera Walter Xenia Yusuf Zoe Amir Beata Carlos Dora Emil Farah Goran Hana
    Ivan Julia Kofi Lucia Milan Nadia Oscar Petra Rahul Selma Tariq
""")

LANGUAGES = (
    "Python",
    "Python",
    "Python",
    "Python",
    "JavaScript",
    "Java",
    "C",
    "C++",
    "Go",
    "Rust",
    "TypeScript",
    "Ruby",
)

CODE_WORDS = _words("""
    user order item price customer ticket score player message event invoice product account file record
    number word line path token node edge queue stack cache timer server client request session image
    pixel matrix vector sensor signal letter page report task project employee salary address region
    country temperature distance speed weight colour shape book author
""")

CODE_TASKS = (
    "Write a {language} function that sorts a list of {thing}s by {other}.",
    "Write a {language} function that counts how often each {thing} appears in a list.",
    "Write a {language} program that reads a file of {thing}s and prints the {other} with the highest value.",
    "Write a {language} class for a {thing} with a {other}, with methods to add, remove and list.",
    "Write a {language} function that removes duplicates from a list of {thing}s and keeps the order.",
    "Write a {language} function that groups {thing}s by {other}.",
    "Write a {language} function that checks whether a {thing} is valid, and explain it.",
    "Write a {language} function that computes the average {other} of all {thing}s.",
    "Implement a binary search over sorted {thing}s in {language}.",
    "Implement a linked list of {thing}s in {language}.",
    "Implement bubble sort in {language} for a list of {thing}s.",
    "Implement merge sort in {language}.",
    "Implement a stack and a queue in {language}, with an example that uses {thing}s.",
    "Write a binary tree in {language} that stores {thing}s, with insert and in-order traversal.",
    "Write a {language} function that returns the n-th Fibonacci number, and one that tests for primes.",
    "Write a {language} function that reverses the words of a {thing}.",
    "Write a {language} program that asks for a {thing} and a {other} and prints their sum.",
    "How do I read a JSON file of {thing}s in {language}?",
    "How do I handle errors in {language} when a {thing} is missing?",
    "Explain how a loop works in {language}, with an example about {thing}s.",
    "Explain inheritance in {language} with a {thing} and a {other}.",
    "Explain the difference between a dictionary and a list in {language}, using {thing}s.",
    "Write an SQL table for {thing}s and {other}s and three queries on it.",
    "Write an SQL query that counts {thing}s per {other}, with the largest first.",
    "Write an HTML page that shows a list of {thing}s.",
    "Write CSS for a table of {thing}s with a blue header.",
    "Write a shell script that backs up all {thing} files of a folder.",
    "Write a regular expression that matches a {thing} number such as AB-1234, and explain it.",
    "Write a REST API in {language} for {thing}s with create, read, update and delete.",
    "Write unit tests for a {language} function that adds a {thing} to a {other}.",
    "Write a {language} function that finds the longest common prefix of several {thing}s.",
    "Write a {language} function that flattens a nested list of {thing}s.",
    "Write a recursive {language} function about a {thing} that contains other {thing}s.",
    "Write a command line program in {language} that manages {thing}s.",
    "Write a {language} generator or iterator that yields {thing}s in batches.",
    "Write a {language} function that converts a {thing} to a string and back.",
    "Show me how to write a class in {language} with a constructor, for a {thing} with {other} and name.",
    "Write a {language} simulation of a {thing} that moves on a grid.",
)
