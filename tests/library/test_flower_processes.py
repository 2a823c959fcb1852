"""The example on a SuperLink and two SuperNodes of this machine gives the network of `fit`."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", minversion="1.42")

APP = Path(__file__).parents[2] / "examples" / "flower"
BIN = Path(sys.executable).parent
FEDIPG = {"^algorithm =.*": 'algorithm = "fedipg"', "^.method.*": "[method]\\npenalty = 0.1"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Machine:
    """A folder with the app and the nodes' data, and the processes that run it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.environment = {
            **os.environ,
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_ENABLE_COMPILATION_CACHE": "true",
        }
        (folder / "home").mkdir()
        link = f'[superlink.loop]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (folder / "home" / "config.toml").write_text(link)
        shutil.copytree(APP, folder / "app", ignore=shutil.ignore_patterns("__pycache__"))
        rng = np.random.default_rng(0)
        for node, number in enumerate((70, 110)):
            y = np.arange(number) % 10
            x = rng.integers(0, 99, (number, 8, 8, 1)) + 15 * y[:, None, None, None]
            arrays = {"x": x.astype("uint8"), "y": y, "test": np.arange(number) < 10}
            np.savez(folder / f"node{node}.npz", **arrays)

    @contextlib.contextmanager
    def process(self, *command: str) -> Iterator[subprocess.Popen[bytes]]:
        """A process of a group of its own, which ends with the block."""
        with (self.folder / f"{command[0]}.log").open("ab") as log:
            started = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield started
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGTERM)
                started.wait(20)
                os.killpg(started.pid, signal.SIGKILL)

    @contextlib.contextmanager
    def link(self) -> Iterator[None]:
        address = "--host", "127.0.0.1", "--port", str(self.port)
        flags = "--insecure", "--disable-runtime-dependency-installation"
        with self.process("flower-superlink", *flags, *address) as process:
            while socket.socket().connect_ex(("127.0.0.1", self.port)):
                assert process.poll() is None
                time.sleep(1)
            yield

    def node(self, client: int) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        data, state = self.folder / f"node{client}.npz", self.folder / f"own{client}.safetensors"
        config = f'client={client} data="{data}" state="{state}"'
        address = "--superlink", f"127.0.0.1:{self.port}", "--host", "127.0.0.1"
        more = "--port", str(free_port()), "--node-config", config
        return self.process("flower-supernode", "--insecure", *address, *more)

    def choose(self, changes: Mapping[str, str]) -> None:
        """Write the settings with lines replaced, for a new run."""
        text = (APP / "settings.toml").read_text()
        for line, new in changes.items():
            text = re.sub(line, new, text, flags=re.MULTILINE)
        (self.folder / "app" / "settings.toml").write_text(text)
        shutil.rmtree(self.folder / "results", ignore_errors=True)

    def run(self) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return self.process("flwr", "run", "app", "loop", "--stream")

    def log(self) -> str:
        return (self.folder / "flwr.log").read_text()

    def wait(self, words: str, number: int = 1) -> None:
        """Wait until the log of all runs has the words so often."""
        deadline = time.time() + 900
        while len(re.findall(words, self.log())) < number:
            assert time.time() < deadline, self.log()
            time.sleep(1)


@pytest.mark.slow
def test_processes_give_the_network_of_fit_and_one_of_them_may_end(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with contextlib.ExitStack() as processes:
        processes.enter_context(machine.link())
        processes.enter_context(machine.node(0))
        node = processes.enter_context(machine.node(1))
        for index, changes in enumerate([{}, FEDIPG]):
            machine.choose(changes)
            with machine.run():
                machine.wait("round 3, validation", index + 1)
            compared = subprocess.run(
                [sys.executable, "app/task.py", "node0.npz", "node1.npz"],
                cwd=tmp_path,
                env=machine.environment,
                capture_output=True,
                text=True,
                check=True,
            )
            print(compared.stdout, machine.log())
            assert float(compared.stdout.split()[-1]) < 1e-6
        machine.choose({"^rounds.*": "rounds = 5\\ntimeout = 60"})
        with machine.run():
            machine.wait("round 1, validation", 3)
            os.killpg(node.pid, signal.SIGKILL)
            machine.wait("round 5, validation")
        print(machine.log())
        assert re.search("client 1 is absent|client 1 has left", machine.log())
