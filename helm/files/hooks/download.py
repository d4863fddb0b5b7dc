"""Brings a model's file from a URL to the models' volume, before its worker starts.

Arguments: the URL, the file, and the SHA-256 that it must have (empty: any). What has come is kept, and the next try
goes on there. Of several pods on one volume one brings it, and the others wait.
"""

import fcntl
import hashlib
import os
import sys
import urllib.error
import urllib.request

url, target, wanted = sys.argv[1:]
CHUNK = 1 << 20
SILENCE_S = 60
partial = f"{target}.part"


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download():
    there = os.path.getsize(partial) if os.path.exists(partial) else 0
    headers = {"range": f"bytes={there}-"} if there else {}
    try:
        answer = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=SILENCE_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and there:  # all of it is here already
            return
        raise
    with answer, open(partial, "ab" if answer.status == 206 else "wb") as file:
        length = int(answer.headers.get("content-length", -1))
        come = 0
        while chunk := answer.read(CHUNK):
            file.write(chunk)
            come += len(chunk)
    if come < length:
        raise OSError(f"it broke off after {there + come} bytes")


def bring():
    try:
        download()
    except OSError as error:
        sys.exit(f"{url}: {error}; the next start goes on where this one ended")
    if wanted and (found := digest(partial)) != wanted.lower():
        os.unlink(partial)
        sys.exit(f"{url}: its SHA-256 is {found}, and not {wanted}; correct models[].sha256 or the address")
    os.replace(partial, target)
    print(target)


if os.path.exists(target):
    sys.exit(0)
# Never removed: whoever waits for a file without a name would hold another lock than the one who makes a new one.
with open(f"{target}.lock", "w") as lock:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        sys.exit(f"{target}.lock: {error}; the volume must know locks (flock), since its pods share it")
    if not os.path.exists(target):
        bring()
