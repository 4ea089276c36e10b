"""What the check asks: scripts that run inside containers, and the request that it sends. Judges nothing."""

from typing import Any

CONTROL = """
import json, pathlib, urllib.request as r
token = pathlib.Path('/run/control/read_token').read_text().strip()
ask = lambda path: json.load(r.build_opener(r.ProxyHandler({})).open(
    r.Request('http://127.0.0.1:8101/v1/spec/' + path, headers={'authorization': 'Bearer ' + token}), timeout=10))
print(json.dumps({'boot_id': ask('info')['boot_id'], 'plan': ask('plan')}))
"""
PROFILES = """
import pathlib
print(sorted((path.name, path.stat().st_mtime_ns) for path in pathlib.Path('/data').rglob('*.json')))
"""
BACKUP = (
    "import sqlite3; source = sqlite3.connect('/data/controller.sqlite3'); "
    "source.execute(\"VACUUM INTO '/data/backup.sqlite3'\"); "
    "print(sqlite3.connect('/data/backup.sqlite3').execute('PRAGMA integrity_check').fetchone()[0])"
)


def chat(max_tokens: int) -> dict[str, Any]:
    """Return a greedy request."""
    messages = [{"role": "user", "content": "Write the numbers from one to forty in words, one per line."}]
    return {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
