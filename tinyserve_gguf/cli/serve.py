"""`serve MODEL`: an OpenAI-compatible server on a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tinyserve_gguf.cli.chat import abort_shown
from tinyserve_gguf.cli.model_argument import model_argument
from tinyserve_gguf.cli.options import placement_options, sampling_options, take_sampling
from tinyserve_gguf.cli.output import say
from tinyserve_gguf.errors import OptionError

INSTALL = "pip install 'tinyserve-gguf[serve]'"
EXTRA = ("fastapi", "starlette", "pydantic", "uvicorn", "prometheus_client")
LOOPBACK = ("localhost", "::1")

EPILOG = """\b
Examples:
  serve model.gguf                                         on http://127.0.0.1:8080, for this machine alone
  serve model.gguf --host 0.0.0.0 --api-key-file key.txt   for others, who must know a key
  serve model.gguf --parallel 4 --queue 32 -c 8192         four replies at once, 32 requests that wait
  serve model.gguf --window --expert-cache 6GiB            conversations without end
"""


@click.command(epilog=EPILOG)
@model_argument()
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, metavar="N", help="Port to listen on; 0 = any that is free.")
@click.option("--api-key", "keys", multiple=True, metavar="KEY", help="Key that requests must have; may be given several times.")
@click.option("--api-key-file", type=click.Path(path_type=Path), metavar="FILE", help="Keys, one a line. Other users see a command line, not a file.")
@click.option("--alias", metavar="NAME", help="Name of the model in requests.  [default: that of the file]")
@click.option("--parallel", "n_parallel", type=click.IntRange(1, 64), default=1, show_default=True, metavar="N", help="Replies computed at once.")
@click.option("--queue", "n_queue", type=click.IntRange(0, 4096), default=16, show_default=True, metavar="M", help="Requests that may wait.")
@click.option("--max-body", type=click.IntRange(1), default=4 << 20, show_default=True, metavar="BYTES", help="Largest body of a request.")
@click.option("--chat-format", metavar="NAME", help="Chat format of llama-cpp-python to use instead of the template in the file.")
@click.option(
    "--pooling", type=click.Choice(("mean", "last", "cls")), default="mean", show_default=True, help="How a text's embeddings become one vector."
)
@placement_options
@sampling_options
def serve(
    model: str,
    host: str,
    port: int,
    keys: tuple[str, ...],
    api_key_file: Path | None,
    alias: str | None,
    n_parallel: int,
    n_queue: int,
    max_body: int,
    chat_format: str | None,
    pooling: str,
    **options: Any,
) -> None:
    """Serve MODEL, a GGUF file or a known name, over HTTP, as OpenAI's API has it, with a page at /.

    Sampling options are for requests that do not say. Ctrl-C or SIGTERM finishes the replies that run; a second Ctrl-C gives them up.
    """
    sampling = take_sampling(options)
    keys = (*keys, *_read_keys(api_key_file)) if api_key_file else keys
    if not all(key.strip() == key and key.isascii() and key.isprintable() and key for key in keys):
        raise OptionError("an API key is one or more printable ASCII characters, without blanks around")
    try:
        from tinyserve_gguf import serve as server
        from tinyserve_gguf.serve_state import ServeOptions
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] in EXTRA:
            raise OptionError(f"serve needs the package {error.name.split('.')[0]}; run: {INSTALL}") from None
        raise
    with server.listen(host, port) as listener:
        with abort_shown(model):
            llama, lines = server.open_llama(model, n_parallel=n_parallel, **options)
            if chat_format is not None:
                server.check_chat_format(llama, chat_format)
        for line in lines:
            say(line)

        def ready() -> None:
            name = alias or Path(model).stem
            click.echo(f"serving {name} on {server.url_of(listener)}, {n_parallel} at once, {n_queue} may wait; Ctrl-C stops it", err=True)
            if not keys and host not in LOOPBACK and not host.startswith("127."):
                click.echo("warning: no --api-key, so that whoever reaches this port may use it", err=True)

        settings = ServeOptions(
            model_id=alias or Path(model).stem,
            keys=keys,
            n_parallel=n_parallel,
            n_queue=n_queue,
            max_body=max_body,
            expert_cache=options["expert_cache"],
            pooling=pooling,
            chat_format=chat_format,
            sampling=sampling,
        )
        server.serve(llama, settings, listener, ready=ready, verbose=click.get_current_context().find_root().params["verbose"])


def _read_keys(path: Path) -> list[str]:
    """OptionError if there are none."""
    try:
        keys = [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--api-key-file {path}: {error}") from error
    if not keys:
        raise OptionError(f"--api-key-file {path} holds no key")
    return keys
