"""Serves the model of ``make demo`` over HTTP in OpenAI's completion format.

Run it with ``make serve``, which trains the model first if it is not there; then, for instance,

    curl -N localhost:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 200, "stream": true}'

``pip install 'tilewright[serve]'`` installs what this file imports.
"""

import argparse
from pathlib import Path

import jax
import uvicorn
from byte_transformer import ModelConfig
from engine.api import Api, Bytes
from engine.engine import Engine
from engine.models import ByteModel
from engine.programs import EngineConfig
from engine.requests import Request, Sampling
from engine.thread import EngineThread
from generate import load_parameters


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--parameters", type=Path, default=Path(".demo/parameters.npz"))
    parser.add_argument("--name", default="bytes", help="of the model, in answers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--slots", type=int, default=8, help="requests that run at the same time")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--longest", type=int, default=2048, help="tokens of prompt and answer of one request")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a step in which prompts are read")
    parser.add_argument("--max-waiting", type=int, default=100)
    return parser.parse_args()


def warm_up(engine: Engine) -> None:
    """Compiles the programs: steps with a part of a prompt and without one, with limits on the tokens and without."""
    prompt = [1] * (engine.config.slots + 2)
    for sampling in (Sampling(), Sampling(top_p=0.9)):
        engine.run([Request(prompt, 2, sampling)])


def main() -> None:
    arguments = parse_arguments()
    config = EngineConfig(
        arguments.slots, arguments.page_size, arguments.pages, arguments.longest, arguments.chunk, arguments.max_waiting
    )
    engine = Engine(ByteModel(), load_parameters(arguments.parameters, ModelConfig()), config)
    print(f"compiling for {jax.devices()[0].device_kind}", flush=True)
    warm_up(engine)
    api = Api(EngineThread(engine), Bytes(), arguments.name)
    uvicorn.run(api.app(), host=arguments.host, port=arguments.port, log_level="info")


if __name__ == "__main__":
    main()
