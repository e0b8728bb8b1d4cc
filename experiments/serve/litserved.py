"""A run's model behind LitServe, with batches of as many and for as long as those of ``runner serve``."""

import json
import sys

import litserve
from serve import loaded


class Api(litserve.LitAPI):
    """Asks the model for a batch."""

    def setup(self, device):
        self.served = loaded(sys.argv[1])

    def decode_request(self, request):
        return self.served.request(**request)

    def batch(self, inputs):
        return inputs

    def predict(self, inputs):
        return self.served.answers(inputs)

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return json.loads(output)


if __name__ == "__main__":
    server = litserve.LitServer(Api(max_batch_size=32, batch_timeout=0.02), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="critical")
