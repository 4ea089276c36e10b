"""`spec-worker`: run a worker, check its configuration, fetch the default model, train a draft head.

Only arguments, messages and exit codes; heavy imports wait until a command needs them.
"""

import argparse
import json
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from worker.config import ENV_PREFIX, LogConfig, WorkerConfig, load_config
from worker.logs import configure_logging
from worker.train import arguments as train_arguments

if TYPE_CHECKING:
    from worker.process import Loaded

EXIT_OK, EXIT_FAILED, EXIT_BAD_CONFIG = 0, 1, 2

DESCRIPTION = """\
Serve a language model with speculative decoding, at a depth that can be changed while it runs.
"""

EPILOG = f"""\
examples:
  spec-worker run                                    the default model on 127.0.0.1:8100
  spec-worker run --config configs/worker.toml       your own settings
  spec-worker config check --config my.toml          print what would be used, or what is wrong
  spec-worker fetch-model                            fetch the default model now, for use offline

configuration:
  Defaults, then the file, then the environment: {ENV_PREFIX}SECTION__FIELD, for example
  {ENV_PREFIX}MODEL__PATH=/models/my-llama  or  {ENV_PREFIX}SERVER__PORT=9000.
  configs/worker.toml shows every field with its meaning.

exit codes:
  0  stopped on request     1  cannot serve (address taken, model not loadable)     2  bad arguments or configuration

The first SIGTERM or Ctrl-C drains: new requests get 503, running ones may finish. The second leaves at once.
"""

RUN_EPILOG = """\
Two listeners open at once. The inference port serves /v1/chat/completions, /v1/completions, /generate, /v1/models,
/server_info, /metrics, /healthz and /readyz (503 until the model is loaded), with a key if there is one
(server.api_key_file); /openapi.json describes it. The control port serves /v1/spec/{info,stats,plan}; it stays on
loopback unless there is a token (server.control_token_file) or server.allow_open_control is true.
"""


class BadConfiguration(Exception):
    """The configuration is refused; `lines` are `field: message`."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.command(arguments)
    except BadConfiguration as error:
        for line in error.lines:
            _complain(line)
        return EXIT_BAD_CONFIG
    return status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="spec-worker", description=DESCRIPTION, epilog=EPILOG, formatter_class=raw
    )
    parser.add_argument("--version", action="version", version=f"spec-worker {version('slipstream')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run", help="load the model and serve it", epilog=RUN_EPILOG, formatter_class=raw
    )
    _add_config(run)
    run.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        help="default: log.level of the configuration",
    )
    run.set_defaults(command=_run)

    config = commands.add_parser("config", help="look at the configuration")
    actions = config.add_subparsers(title="actions", metavar="ACTION", required=True)
    check = actions.add_parser(
        "check", help="print the resolved configuration as JSON, or what is wrong with it"
    )
    _add_config(check)
    check.set_defaults(command=_config_check)

    record = commands.add_parser(
        "record", help="record what the drafter gets right on your texts, for `spec-controller simulate`"
    )
    _add_config(record)
    record.add_argument(
        "--texts", type=Path, required=True, metavar="FILE", help='JSONL, {"text": "…"} per line'
    )
    record.add_argument("--out", type=Path, required=True, metavar="FILE", help="where the trace (JSON) goes")
    record.add_argument("--max-tokens", type=int, default=128, metavar="N", help="per text; default: 128")
    record.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    record.set_defaults(command=_record)

    train = commands.add_parser(
        "train-draft",
        help="train a draft head for a model, on this machine",
        description=train_arguments.DESCRIPTION,
        formatter_class=raw,
    )
    train_arguments.add_arguments(train)
    train.set_defaults(command=_train_draft)

    fetch = commands.add_parser("fetch-model", help="fetch and convert the default model, unless it is there")
    fetch.set_defaults(command=_fetch_model)
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; default: built-in defaults")


def _load_config(path: Path | None) -> WorkerConfig:
    """Load and check everything that can be checked without the model (BadConfiguration otherwise)."""
    from worker.access import AccessError, read_api_key, read_control_tokens

    try:
        config = load_config(path)
        read_control_tokens(config.server)
        read_api_key(config.server)
    except OSError as error:
        raise BadConfiguration([f"--config: cannot read {path}: {error.strerror}"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadConfiguration([f"--config: {path} is not TOML: {error}"]) from None
    except ValidationError as error:
        raise BadConfiguration(field_lines(error)) from None
    except AccessError as error:
        raise BadConfiguration([str(error)]) from None
    except ValueError as error:  # an environment variable that names no field, or is no JSON
        raise BadConfiguration([str(error)]) from None
    return config


def field_lines(error: ValidationError) -> list[str]:
    """Return `field: message` lines; checks over several fields begin their message with the field's name."""
    lines = []
    for item in error.errors():
        field = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "value_error" and "." in message.split()[0]:
            lines.append(f"{message.split()[0]}: {message}")
        else:
            given = "" if isinstance(item["input"], dict) else f" (got {item['input']!r})"
            lines.append(f"{field}: {message}{given}")
    return lines


def _run(arguments: argparse.Namespace) -> int:
    config = _load_config(arguments.config)
    log = (
        config.log
        if arguments.log_level is None
        else LogConfig(format=config.log.format, level=arguments.log_level)
    )
    configure_logging(log)
    from worker.process import StartFailure, run

    try:
        return run(config, _load_model)
    except StartFailure as error:
        _complain(str(error))
        return EXIT_FAILED


def _load_model(config: WorkerConfig) -> "Loaded":
    """Load engine and tokenizer, and start the engine. Slow: seconds, minutes with a download."""
    from worker.build import build_engine, model_directory
    from worker.process import Loaded
    from worker.tokenization import Tokenizer

    tokenizer = Tokenizer.load(model_directory(config.model.path))
    engine = build_engine(config)
    engine.start()
    return Loaded(engine, tokenizer)


def _config_check(arguments: argparse.Namespace) -> int:
    config = _load_config(arguments.config)
    sys.stdout.write(json.dumps(config.model_dump(mode="json"), indent=2) + "\n")
    return EXIT_OK


def _record(arguments: argparse.Namespace) -> int:
    from worker.record import record_file
    from worker.request import RequestRejected

    config = _load_config(arguments.config)
    limits = (
        (arguments.max_tokens < 1, "--max-tokens: must be at least 1"),
        (
            not 0 <= arguments.temperature <= 100,
            "--temperature: must be within 0…100",
        ),
    )
    if wrong := [message for is_wrong, message in limits if is_wrong]:
        raise BadConfiguration(wrong)
    try:
        trace = record_file(
            config, arguments.texts, max_tokens=arguments.max_tokens, temperature=arguments.temperature
        )
        arguments.out.write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")
    except (OSError, ValueError, RuntimeError, RequestRejected) as error:
        _complain(str(error))
        return EXIT_FAILED
    places = sum(len(stream) for stream in trace["streams"])
    sys.stdout.write(f"{arguments.out}: {len(trace['streams'])} texts, {places} places\n")
    return EXIT_OK


def _train_draft(arguments: argparse.Namespace) -> int:
    from worker.train.command import run

    try:
        run(arguments)
    except (OSError, ValueError) as error:
        _complain(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        _complain("interrupted; the same command goes on from the last report")
        return EXIT_FAILED
    return EXIT_OK


def _fetch_model(arguments: argparse.Namespace) -> int:
    from worker.models.config import ModelError
    from worker.models.fetch import ensure_default_model

    try:
        directory = ensure_default_model()
    except (ModelError, OSError) as error:
        _complain(str(error))
        return EXIT_FAILED
    sys.stdout.write(f"{directory}\n")
    return EXIT_OK


def _complain(line: str) -> None:
    sys.stderr.write(f"spec-worker: {line}\n")
