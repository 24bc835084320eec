"""An inference service: HTTP requests with tokens, answered by a pipeline under Alpa. Nothing here knows of hwaware.

A client in a thread sends a few requests and ends the service; without it, it would go on for ever.
"""

import json
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import alpa
import jax
import jax.numpy as jnp
import numpy as np
from models import Gpt

alpa.init(cluster="ray")
model = Gpt()
REQUESTS, SAMPLES = 4, 8


@alpa.parallelize(
    donate_argnums=(),
    method=alpa.PipeshardParallel(
        num_micro_batches=8,
        pipeline_schedule="inference",
        layer_option=alpa.AutoLayerOption(layer_num=4),
        stage_option="auto",
    ),
)
def next_tokens(params, tokens):
    """The most likely token after each sequence."""
    return jnp.argmax(model.apply({"params": params}, tokens)[:, -1], axis=-1)


def initial_params():
    """Fresh parameters."""
    return model.init(jax.random.PRNGKey(0), np.zeros((1, model.length), np.int32))["params"]


# Parameters are made where they are used, and stay there.
create = alpa.CreateStateParallel(next_tokens, np.zeros((SAMPLES, model.length), np.int32))
params = alpa.parallelize(initial_params, method=create)()


class Service(BaseHTTPRequestHandler):
    """POST a JSON list of sequences, get the next token of each."""

    def do_POST(self):
        """Answer one request."""
        tokens = np.array(json.loads(self.rfile.read(int(self.headers["Content-Length"]))), np.int32)
        answer = json.dumps(np.asarray(next_tokens(params, tokens)._value).tolist()).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        """Say nothing of every request."""


def client(port):
    """Send sequences, print the answers."""
    generator = np.random.default_rng(0)
    for number in range(REQUESTS):
        tokens = generator.integers(model.vocabulary, size=(SAMPLES, model.length)).tolist()
        request = urllib.request.Request(f"http://127.0.0.1:{port}", json.dumps(tokens).encode())
        with urllib.request.urlopen(request, timeout=180) as response:
            print(f"request {number}: next tokens {json.load(response)}", flush=True)


with HTTPServer(("127.0.0.1", 0), Service) as server:
    thread = threading.Thread(target=client, args=(server.server_port,))
    thread.start()
    server.timeout = 1  # seconds; a client that gave up ends the service, too
    while thread.is_alive():
        server.handle_request()
alpa.shutdown()
