"""Tables of bad and odd input: what is given, and what its one line has to say. A new case is a line here."""

from __future__ import annotations

CONFIG: dict[str, str] = {  # --set -> what is named
    "rl.no_such=1": "no such field", "nothing=1": "nothing", "rl=1": "section", "rl.clip_high=inf": "rl.clip_high", "rl.clip_high=nan": "rl.clip_high",
    "rl.group_size=1": "group_size=1", "rl.group_size=1.5": "rl.group_size", "rl.group_size='8'x": "--set", "rl.num_iterations=-1": "rl.num_iterations",
    "rl.num_iterations=1000000000000000000000": "rl.num_iterations", "rl.temperature=0": "rl.temperature", "rl.temperature=-1": "rl.temperature",
    "rl.top_p=0": "rl.top_p", "rl.top_p=2": "rl.top_p", "rl.rewards=1": "rl.rewards", "rl.rewards={exact = nan}": "rl.rewards.exact", "rl.rewards={}": "rl.rewards",
    "rl.filters={nonzero_std = nan}": "rl.filters", "rl.estimator=grop": "rl.", "rl.kl=mostly": "rl.kl",
    "rl.num_prompts=0": "rl.num_prompts", "rl.num_steps=0": "rl.num_steps", "rl.learning_rate=nan": "rl.learning_rate", "rl.learning_rate=-1": "rl.learning_rate",
    "rl.reward_timeout_s=inf": "rl.reward_timeout_s", "rl.reward_timeout_s=0": "rl.reward_timeout_s", "rl.completion_tokens_max=0": "rl.completion_tokens_max",
    "rl.completion_tokens_max=99999999": "completion_tokens_max", "sft.num_steps=-1": "sft.num_steps", "sft.batch_size=0": "sft.batch_size",
    "sft.validation_fraction=1": "sft.validation_fraction", "sft.segment_steps=0": "sft.segment_steps", "model.hidden_size=0": "model.hidden_size",
    "model.hidden_size=12": "model.hidden_size", "model.num_heads=3": "model.", "model.num_kv_heads=3": "model.num", "model.dtype=int8": "model.dtype",
    "model.context_tokens_max=0": "model.context_tokens_max", "model.chat_template=5": "model.chat_template",
    "data.words.weight=inf": "data.words.weight", "data.words.weight=0": "data.words.weight", "data.words.part=some": "data.words.part",
    "data.nobody.part=all": "nobody", "data.part=all": "data.part", "data=1": "data", "data=[]": "data", "data.words.rows_max=-1": "data.words.rows_max",
    "data.words.heldout_fraction=2": "data.words.heldout_fraction", "data.words.use=train": "data.words.use", "data.words.args={seed = 99999999999999999999}": "args.seed",
    "engines.count=0": "engines.count", "engines.kind=tgi": "engines.kind", "engines.threads=3": "engines.threads", "engines.progress_timeout_s=nan": "engines.progress_timeout_s",
    "engines.flags='--x'": "engines.flags", "engines.flags=['--api-key', 'x']": "environment", 
    "trainer.ranks=0": "trainer.ranks", "trainer.nodes=2": "one node", "trainer.tokens_max=1": "tokens_max", "trainer.place=moon": "trainer.place",
    "checkpoint.state_every=0": "checkpoint.state_every", "evaluation.pass_threshold=nan": "evaluation.pass_threshold", "evaluation.every=-1": "evaluation.every",
    "budget.wall_clock_h=-1": "budget.wall_clock_h", "budget.gpu_h=nan": "budget.gpu_h", "stop.kl_max=inf": "stop.kl_max", "approval=['x']": "approval",
    "store=file://host/path": "store=", "store=s3://b/x?y": "store=", "store=s3://b/x#y": "store=", "store=gs://b": "store=", "store=''": "store",
    "store=memory://": "store=", "store=http://x/y": "store=", "store=file://": "store=", "run=../x": "run", "run=.": "run", "run=-x": "run", "run='a b'": "run", "run=a/b": "run",
    "run='é'": "run", "run='" + "x" * 5000 + "'": "run", "seed=-1": "seed", "seed=1.5": "seed", "seed=99999999999999999999": "seed", "tracking.uri=http://u:p@h": "environment",
    'engines.environment={"A=B" = "1"}': "engines.environment={'A=B'", 'engines.environment={"" = "1"}': "engines.environment={''", 'engines.environment={A = "x\\u0000"}': "zero byte",
    'engines.environment={"A\\u0000" = "x"}': "engines.environment={", "engines.environment={A = 1}": "engines.environment.A",
    "model.chat_template_args={d = 2024-01-01}": "model.chat_template_args.d=2024-01-01: is a date", "rl.reward_args={exact = {d = 2024-01-01T00:00:00Z}}": "rl.reward_args.exact.d",
    "data.words.args={d = [{t = 10:00:00}]}": "args.d.0.t=10:00:00: is a date or a time", "model.chat_template_args={d = '\udcff'}": "model.chat_template_args.d", "rl.filters={'\udcff' = 1.0}": "rl.filters",
    ".".join(["a"] * 2000) + "=1": "no field is so deep", "rl." + ".".join(["a"] * 20000) + "=1": "no field is so deep", "rl.clip_high=\udcff": "rl.clip_high", "\udcff=1": "", "\udcff": "section.field=value",
    "rl.reward_args=" + "{a = " * 60 + "1" + "}" * 60: "no field is so deep", "rl.reward_args.x=" + "[" * 60 + "]" * 60: "no field is so deep",
    "store=~nosuchuser/x": "no home folder of '~nosuchuser'", "novalue": "section.field=value", "=1": "section.field=value", "a.b.c.d=1": "a", "rl.clip_high": "section.field=value", "rl..clip_high=1": "rl", "rl.clip_high=[": "--set",
    "rl.rewards={exact = }": "--set", "\0=1": "", "rl.clip_high=\0": "rl.clip_high", "rl.clip_high=" + "9" * 5000: "rl.clip_high", "sft={num_steps = 'x'}": "sft.num_steps",
}  # fmt: skip

FILES: dict[str, bytes] = {  # a config file that is none
    "empty braces": b"{}", "JSON": b'{"rl": 1}', "cut": b"[rl]\nclip_high =", "binary": b"\xff\xfe\x00", "a key twice": b"[rl]\nclip_high=1\nclip_high=2\n",
    "a section twice": b"[rl]\n[rl]\n", "brackets": b"a = " + b"[" * 5000, "a list of sections": b"[[rl]]\nclip_high=0.2\n", "an unknown section": b"[rls]\nx=1\n",
    "100,000 unknown keys": b"".join(b"k%d = 1\n" % number for number in range(100_000)), "a deep key": b".".join([b"a"] * 2000) + b" = 1", "much": b"#" * (100 << 20),
    "100,000 unknown fields": b"[rl]\n" + b"".join(b"k%d = 1\n" % number for number in range(100_000)), "a date for a model": b"model.chat_template_args.d = 2024-01-01\n",
    "a date": b"[rl]\nclip_high=2024-01-01\n", "data without a name": b"[[data]]\nuse='rl'\n", "a zero byte": b"[rl]\nx=\0\n", "zeros": b"\0" * 1000,
}  # fmt: skip

COMMANDS: list[tuple[str, str]] = [  # arguments -> what is said; exit code 2
    ("run", "Missing argument"), ("run nope", "nope"), ("run tinny", "did you mean tiny?"), ("run /nowhere.toml", "there is no such file"), ("run tiny --run=", "--run ''"),
    ("run tiny --run a/b", "slash"), ("run tiny --run ..", "run"), ("run tiny --set", "requires an argument"), ("run tiny --sets x=1", "--set"), ("run tiny extra", "extra"),
    ("run .", "preset"), ("run ''", "preset"), ("run .toml", "no such file"), ("run ../tiny", "../tiny"), ("plan nope", "nope"), ("plan", "Missing argument"),
    ("plan tiny --set x", "section.field=value"), ("runs --store gs://x", "store="), ("runs --store file://host/x", "store="), ("runs --store s3://", "store="), ("runs x", "x"),
    ("show", "Missing argument"), ("show nobody", "no run 'nobody'"), ("show ../a", "folder name"), ("show ''", "folder name"), ("show a/", "folder name"), ("show a --iteration x", "integer"),
    ("show a --iteration -1", "--iteration -1"), ("show a --iteration 99", "not committed"), ("show a --iteration 99999999999999999999", "not committed"), ("show a --rows x", "integer"),
    ("show a --store a_file", "store="), ("verify", "Missing argument"), ("verify nobody", "no run 'nobody'"), ("verify ..", "folder name"), ("verify a --store a_file/x", "store="),
    ("verify a b", "b"), ("compare a", "Missing argument"), ("compare a nobody", "no run 'nobody'"), ("compare nobody a", "no run 'nobody'"), ("compare a ../b", "folder name"),
    ("files a", "Missing argument"), ("files a nothing", "no files of kind 'nothing'"), ("files a ../policy", "no files of kind"), ("files nobody policy", "no run 'nobody'"),
    ("gc nobody", "no run 'nobody'"), ("gc ../a --delete", "folder name"), ("gc a --deleted", "--delete"), ("gc", "Missing argument"), ("fork a", "Missing option"),
    ("fork a --at 1", "Missing option"), ("fork a --at x --run n", "--at x"), ("fork a --at -1 --run n", "--at -1"), ("fork a --at 99 --run n", "iteration 99"), ("fork a --at 1.5 --run n", "--at 1.5"),
    ("fork a --at sft --redo score --run n", "--redo score"), ("fork nobody --at 1 --run n", "no run 'nobody'"), ("fork a --at 1 --run b/c", "slash"), ("fork a --at 1 --run c", "that run exists"),
    ("fork a --at 1 --run n --set model.hidden_size=16", "model.hidden_size"), ("fork a --at 1 --run n --redo all", "score"), ("fork a --at 1 --run n --set x", "section.field=value"),
    ("fork a --at 1 --redo score --run n --set rl.num_iterations=9", "rl.num_iterations"), ("fork a --at 99999999999999999999999 --run n", "is not committed"), ("fields x y", "y"),
    ("nope", "No such command"), ("--nope", "No such option"), ("automations --notify x", "PREFECT_API_URL"), ("host", "Missing option"), ("host --run a --store gs://x", "store="),
    ("host --run nobody --set rl.clip_high=1", "engines.*"), ("host --run a --port x", "integer"), ("host --run a --port -1", "--port"), ("host --run a --port 65536", "--port"), ("view --port 65536", "--port"), ("trainer --run a --node -1", "--node"),
    ("run ~nosuchuser/x.toml", "no such file"), ("runs --store ~nosuchuser/x", "no home folder"), ("verify a --store ~nosuchuser", "no home folder"), ("trainer", "Missing option"), ("trainer --run a --set rl.clip_high=1", "trainer.*"),
    ("trainer --run a --node x", "integer"), ("trainer --run a --store file://host/x", "store="), ("trainer --run a --node 7", "are numbered from 0"),
    ("server --port 99999", "--port"), ("server --port=-1", "--port"), ("server --port x", "integer"), ("server --port 0", "--port"), ("server --port", "--port"),
]  # fmt: skip

PROMPTS: dict[str, bytes] = {  # the second row of a JSONL file of prompts
    "no prompt": b'{"answer": "4"}', "empty prompt": b'{"prompt": "", "answer": "4"}', "a number": b'{"prompt": 3, "answer": "4"}', "null": b'{"prompt": null, "answer": "4"}',
    "a null answer": b'{"prompt": "q", "answer": null}', "no content": b'{"prompt": [{"role": "user"}], "answer": "4"}', "no role": b'{"prompt": [{"content": "q"}], "answer": "4"}',
    "the assistant last": b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": "4"}', "half a character": b'{"prompt": "\\ud800", "answer": "4"}', "cut": b"{prompt",
    "a list": b"[1]", "a text": b'"q"', "bare null": b"null", "a number alone": b"7", "no messages": b'{"prompt": [], "answer": "4"}', "messages of text": b'{"prompt": ["q"], "answer": "4"}',
    "messages of null": b'{"prompt": [null], "answer": "4"}', "an object": b'{"prompt": {"role": "user", "content": "q"}, "answer": "4"}', "two objects": b'{"prompt": "q"}{"prompt": "q"}',
    "a trailing comma": b'{"prompt": "q", "answer": "4",}', "single quotes": b"{'prompt': 'q'}",     "an unknown role": b'{"prompt": [{"role": 5, "content": "q"}], "answer": "4"}',
    "a huge number": b'{"prompt": "q", "answer": 1' + b"0" * 5000 + b"}",
}  # fmt: skip
CONVERSATIONS: dict[str, bytes] = {  # the first row of a JSONL file for SFT
    "a prompt alone": b'{"prompt": "q"}', "no messages": b'{"messages": []}', "no assistant": b'{"messages": [{"role": "user", "content": "q"}]}', "a completion alone": b'{"completion": "c"}',
    "null messages": b'{"messages": null}', "messages of text": b'{"messages": ["x"]}', "messages as text": b'{"messages": "x"}', "a null content": b'{"messages": [{"role": "assistant", "content": null}]}',
    "an empty object": b"{}", "a list": b"[]", "cut": b'{"messages": [', "a completion of a number": b'{"prompt": "q", "completion": 5}', "a null completion": b'{"prompt": "q", "completion": null}',
}  # fmt: skip
ANSWERS: dict[str, bytes] = {  # of a reward service
    "nothing": b"", "no JSON": b"<html>", "cut": b'{"reward":', "null": b"null", "a number": b"1", "a list": b"[]", "no reward": b"{}", "a null reward": b'{"reward": null}', "text": b'{"reward": "1"}',
    "NaN": b'{"reward": NaN}', "infinity": b'{"reward": Infinity}', "beyond floats": b'{"reward": 1e999}', "a huge number": b'{"reward": 1' + b"0" * 400 + b"}", "a list of rewards": b'{"reward": [1]}',
    "no parts": b'{"reward": {}}', "a null part": b'{"reward": {"a": null}}', "a part of text": b'{"reward": {"a": "x"}}', "nested parts": b'{"reward": {"a": {"b": 1}}}', "brackets": b"[" * 100_000,
    "deep": b'{"reward":' * 20_000, "binary": b"\xff\xfe", "much": b" " * (2 << 20), "digits": b"1" * 10_000, "two": b'{"reward": 1}{"reward": 1}', "sums beyond floats": b'{"reward": {"a": 1e308, "b": 1e308}}',
}  # fmt: skip
