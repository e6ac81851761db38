"""What the loads in Python have in common: see `../packaged.sh`."""
import hashlib
import os
import time


class Load:
    def __init__(self, dir):
        self.dir = dir
        self.start = time.monotonic()
        open(dir + "/begun", "w").close()

    def over(self):
        return os.path.exists(self.dir + "/stop")

    def done(self, count, unit):
        print("rate", round(count / (time.monotonic() - self.start), 1), unit)
        print("ok", flush=True)


def digest(data):
    return hashlib.sha256(data).digest()


def check(right):
    if not right:
        raise SystemExit("BYTES DIFFER")
