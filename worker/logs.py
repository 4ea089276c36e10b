"""How log records are written: one line each on stderr, for a person or as JSON for a machine.

Modules log with the standard library and know nothing of this; a line is written per change of state, none per
round, and never a prompt or an answer.
"""

import json
import logging
from datetime import UTC, datetime
from typing import Any

from worker.config import LogConfig

CONSOLE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
NOISY = ("uvicorn", "httpx", "httpcore", "transformers", "asyncio", "urllib3", "filelock")
"""Libraries that speak of things that are no change of state, below warnings."""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
    """A record as one JSON object; what was passed as `extra` becomes members of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def configure_logging(config: LogConfig) -> None:
    """Send every record to stderr in the configured shape; replaces what was configured before."""
    output = logging.StreamHandler()
    output.setFormatter(JsonFormatter() if config.format == "json" else logging.Formatter(CONSOLE_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [output]
    root.setLevel(config.level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
