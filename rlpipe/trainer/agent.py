"""torchrun that ends with its parent: a killed flow process leaves no gang behind."""

from __future__ import annotations

from torch.distributed.run import main

from rlpipe.launch import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    main()
