"""A process that joins and stays until it is killed; its argument is a file with what it was handed."""

import pickle
import sys
import threading
from pathlib import Path


def main(handed_over: Path) -> None:
    rendezvous, name, rank, world_size = pickle.loads(handed_over.read_bytes())
    with rendezvous.join(name, rank=rank, world_size=world_size, timeout_s=60):
        threading.Event().wait(120)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
