"""One side of benchmarks/engines.py, run by the Python that its engine is installed for.

    PYTHON benchmarks/engines_side.py '{"kind": "generate", "model": FOLDER, ...}'

Says "ready", then reads a job in JSON a line, {"prompts": [[token, ...], ...], "group": 8, "new":
64}, samples `group` completions of exactly `new` tokens for each prompt, and answers with its
seconds.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

READY_S, ANSWER_S = 900.0, 3600.0
FILE_TYPES = {"f16": 1, "q8_0": 7}  # llama.cpp's LLAMA_FTYPE_MOSTLY_...


class Generate:
    """transformers' generate(), all completions in one batch."""

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self.lm: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def sample(self, prompts: list[list[int]], group: int, new: int) -> None:
        import torch

        rows = torch.tensor(prompts).repeat_interleave(group, 0)
        with torch.inference_mode():
            out = self.lm.generate(
                rows, attention_mask=torch.ones_like(rows), do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                min_new_tokens=new, max_new_tokens=new,
            )  # fmt: skip
        assert out.shape == (len(rows), rows.shape[1] + new)


class Llama:
    """llama.cpp by its own calls: a prompt of a group is computed once and its cells are copied,
    and all sequences decode in one batch. The most likely tokens are taken.
    """

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        import llama_cpp  # pyright: ignore[reportMissingImports]
        import numpy as np

        self.np, self.api, self.threads = np, llama_cpp, threads
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        file = Path(model).with_suffix(f".{dtype}.gguf")
        if not file.exists():
            self._convert(model, file, FILE_TYPES[dtype])
        how = llama_cpp.llama_model_default_params()
        # its AMX kernels of q8_0 end with an illegal instruction (0.3.36, built by gcc 12)
        how.use_extra_bufts = dtype != "q8_0"
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), how)
        self.vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def _convert(self, source: str, file: Path, kind: int) -> None:
        how = self.api.llama_model_quantize_default_params()
        how.ftype, how.allow_requantize, how.pure, how.nthread = kind, True, True, 2
        partial = file.with_suffix(f".{os.getpid()}")
        if self.api.llama_model_quantize(source.encode(), str(partial).encode(), ctypes.byref(how)):
            raise RuntimeError(f"llama.cpp does not convert {source}")
        partial.rename(file)

    def sample(self, prompts: list[list[int]], group: int, new: int) -> None:
        api, count = self.api, len(prompts) * group
        how = api.llama_context_default_params()
        length = -(-(len(prompts[0]) + new) // 256) * 256
        how.n_ctx, how.n_batch, how.n_ubatch, how.n_seq_max = count * length, 512, 512, count
        how.n_threads = how.n_threads_batch = self.threads
        context = api.llama_init_from_model(self.model, how)
        batch = api.llama_batch_init(512, 0, 1)
        memory, tokens = api.llama_get_memory(context), [0] * count
        for index, prompt in enumerate(prompts):
            first = index * group
            entries = [(token, place, first, place == len(prompt) - 1) for place, token in enumerate(prompt)]
            tokens[first : first + group] = self._decoded(context, batch, entries) * group
            for other in range(first + 1, first + group):
                api.llama_memory_seq_cp(memory, first, other, -1, -1)
        for place in range(len(prompts[0]), len(prompts[0]) + new - 1):
            tokens = self._decoded(context, batch, [(token, place, row, True) for row, token in enumerate(tokens)])
        api.llama_batch_free(batch)
        api.llama_free(context)

    def _decoded(self, context: Any, batch: Any, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """The most likely next tokens after the entries: token, position, sequence, and True where
        asked.
        """
        batch.n_tokens = len(entries)
        for index, (token, place, row, is_asked) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, place, is_asked
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        if self.api.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        asked = sum(entry[3] for entry in entries)
        logits = self.np.ctypeslib.as_array(self.api.llama_get_logits(context), (asked, self.vocab))
        return logits.argmax(-1).tolist()


class Server:
    """An engine behind HTTP."""

    def __init__(self, argv: list[str], is_vllm: bool) -> None:
        self.is_vllm = is_vllm
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}"
        log = (Path("/tmp") / f"engines-side-{os.getpid()}.log").open("wb")
        argv = [*argv, "--port", port]
        self.child = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.child.poll() is not None:
                raise RuntimeError(f"{argv[:4]} ended with {self.child.returncode}, see {log.name}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=10):
                    return
            except OSError:
                time.sleep(0.5)
        self.stop()
        raise RuntimeError(f"{argv[:4]} does not answer")

    def sample(self, prompts: list[list[int]], group: int, new: int) -> None:
        with ThreadPoolExecutor(len(prompts)) as pool:  # a request a group, as the pool of a run sends them
            list(pool.map(lambda prompt: self._ask(prompt, group, new), prompts))

    def _ask(self, prompt: list[int], group: int, new: int) -> None:
        if self.is_vllm:
            path, body = "/v1/completions", {
                "model": "policy", "prompt": prompt, "n": group, "max_tokens": new, "ignore_eos": True,
                "temperature": 1.0, "logprobs": 0,
            }  # fmt: skip
        else:
            params = {"max_new_tokens": new, "ignore_eos": True, "temperature": 1.0, "n": group}
            path, body = "/generate", {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            said = json.load(answer)
        if not self.is_vllm:
            answers = said if isinstance(said, list) else [said]
            assert [len(one["output_ids"]) for one in answers] == [new] * group

    def stop(self) -> None:
        os.killpg(self.child.pid, signal.SIGTERM)
        try:
            self.child.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.child.pid, signal.SIGKILL)


class Limits:
    """The bytes that the machine reads a second, and the operations of products a second."""

    def __init__(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.numbers = torch.ones(1 << 26)
        self.squares = {name: torch.ones(1536, 1536, dtype=getattr(torch, name)) for name in ("float32", "bfloat16")}

    def measure(self) -> dict[str, float]:
        import torch

        def seconds(work: Any) -> float:
            times = []
            for _ in range(4):
                started = time.perf_counter()
                work()
                times.append(time.perf_counter() - started)
            return min(times)

        said = {"bytes_per_s": self.numbers.nbytes / seconds(self.numbers.sum)}
        for name, square in self.squares.items():
            said[name] = 2 * 1536**3 / seconds(lambda square=square: torch.mm(square, square))
        return said


def made(how: dict[str, Any]) -> Any:
    """The side of a description."""
    if how["kind"] == "limits":
        return Limits(how["threads"])
    if how["kind"] == "server":
        return Server(how["argv"], how["is_vllm"])
    kind = {"generate": Generate, "llama": Llama}[how["kind"]]
    return kind(how["model"], how["dtype"], how["threads"])


def main() -> None:
    side, answers = made(json.loads(sys.argv[1])), sys.stdout
    sys.stdout = sys.stderr  # libraries print, too
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        said = side.measure() if not job else side.sample(job["prompts"], job["group"], job["new"])
        print(json.dumps(said or {"seconds": time.perf_counter() - started}), file=answers, flush=True)
    if isinstance(side, Server):
        side.stop()


if __name__ == "__main__":
    main()
