"""What the log of `kvstrata server` looks like."""

import enum
import json
import logging
import sys
from datetime import UTC, datetime

__all__ = ["LogFormat", "log_to_stderr"]


class LogFormat(enum.StrEnum):
    TEXT = "text"
    JSON = "json"


class _JsonLines(logging.Formatter):
    """One object a line: time in UTC, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def log_to_stderr(log_format: LogFormat) -> None:
    """Set up the root logger, from INFO upwards."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format is LogFormat.JSON:
        handler.setFormatter(_JsonLines())
    else:
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
