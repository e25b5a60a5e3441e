"""Python stubs of the contract, generated at import from the .proto files."""

import atexit
import pathlib
import shutil
import sys
import tempfile

import grpc_tools
from grpc_tools import protoc

from running_server import ROOT

# The grpc/ folder is left out: its name is the Python package's own, which brings those stubs itself.
_OUT = tempfile.mkdtemp(prefix="k3serve-stubs-")
atexit.register(shutil.rmtree, _OUT, ignore_errors=True)
_PROTO = pathlib.Path(ROOT) / "proto"
_FILES = sorted(str(path.relative_to(_PROTO))
                for folder in ("k3serve", "google") for path in (_PROTO / folder).rglob("*.proto"))
_WELL_KNOWN = pathlib.Path(grpc_tools.__file__).parent / "_proto"
if protoc.main(["protoc", f"-I{_PROTO}", f"-I{_WELL_KNOWN}", f"--python_out={_OUT}", f"--grpc_python_out={_OUT}",
                *_FILES]) != 0:
    sys.exit("protoc failed")
sys.path.insert(0, _OUT)

from google.rpc import error_details_pb2, status_pb2  # noqa: E402, F401
from k3serve.inference.v1 import admin_service_pb2 as admin  # noqa: E402, F401
from k3serve.inference.v1 import admin_service_pb2_grpc as admin_grpc  # noqa: E402, F401
from k3serve.inference.v1 import chat_pb2 as chat  # noqa: E402, F401
from k3serve.inference.v1 import generation_pb2 as generation  # noqa: E402, F401
from k3serve.inference.v1 import generation_service_pb2 as service  # noqa: E402, F401
from k3serve.inference.v1 import generation_service_pb2_grpc as service_grpc  # noqa: E402, F401
from k3serve.inference.v1 import model_service_pb2 as model  # noqa: E402, F401
from k3serve.inference.v1 import model_service_pb2_grpc as model_grpc  # noqa: E402, F401
from k3serve.inference.v1 import tokenizer_service_pb2 as tokenizer  # noqa: E402, F401
from k3serve.inference.v1 import tokenizer_service_pb2_grpc as tokenizer_grpc  # noqa: E402, F401


def chat_spec(text, **fields):
    """A spec that asks one question; `fields` are set on its stopping part."""
    spec = generation.GenerationSpec()
    spec.chat.messages.add(role=chat.ROLE_USER).content.add(text=text)
    for name, value in fields.items():
        setattr(spec.stopping, name, value)
    return spec


def token_spec(ids, **fields):
    spec = generation.GenerationSpec()
    spec.tokens.ids.extend(ids)
    for name, value in fields.items():
        setattr(spec.stopping, name, value)
    return spec


def details(error):
    """The google.rpc details of a grpc.RpcError, by message name."""
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            found = {}
            for any_message in status_pb2.Status.FromString(value).details:
                name = any_message.TypeName().split(".")[-1]
                found[name] = getattr(error_details_pb2, name).FromString(any_message.value)
            return found
    return {}
