"""Brings a model's file from a URL to the models' volume, before its worker starts.

Arguments: the URL, the file, and the SHA-256 that it must have (empty: any). What has come is kept, and the next try
goes on there. Beside a file, `.source` notes the URL and the SHA-256 that it was brought for: one that was brought for
others is fetched again, and serves on until its successor is whole. With a SHA-256 the URL may change without that.
Of several pods on one volume one brings it, and the others wait.
"""

import fcntl
import hashlib
import json
import os
import sys
import urllib.error
import urllib.request

url, target, wanted = sys.argv[1:]
wanted = wanted.lower()
CHUNK = 1 << 20
SILENCE_S = 60
partial = f"{target}.part"


def digest(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_wanted(path):
    """Whether a file was brought for what is asked for; None where its note can't tell."""
    try:
        with open(f"{path}.source") as file:
            noted_url, noted_sha256 = json.load(file)
    except (OSError, ValueError, TypeError):
        return None
    if not wanted:
        return noted_url == url
    return None if noted_url == url and not noted_sha256 else noted_sha256 == wanted


def is_settled():
    """There, and noted as what is asked for: nothing is read, written or locked."""
    return os.path.exists(target) and is_wanted(target)


def is_accepted():
    """There, though its note tells too little: an older version or a person put it there, or no SHA-256 was asked for.

    A SHA-256 decides, read once. Without one it is taken as what the URL gives: fetching anew what every installation
    has would cost hours, and from its note on a change of the URL is seen.
    """
    return os.path.exists(target) and is_wanted(target) is None and (not wanted or digest(target) == wanted)


def note(path):
    """In one step: a pod that finds its file settled reads this without the lock."""
    with open(f"{path}.source.new", "w") as file:
        json.dump([url, wanted], file)
    os.replace(f"{path}.source.new", f"{path}.source")


def remove(*paths):
    for path in paths:
        if os.path.exists(path):
            os.unlink(path)


def begin():
    """What came from elsewhere is not gone on with. Of unknown origin it is where a SHA-256 tells in the end."""
    fits = is_wanted(partial)
    if not fits and not (fits is None and wanted):
        remove(partial)
    note(partial)


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
    begin()
    try:
        download()
    except OSError as error:
        sys.exit(f"{url}: {error}; the next start goes on where this one ended")
    if wanted and (found := digest(partial)) != wanted:
        remove(partial, f"{partial}.source")
        sys.exit(f"{url}: its SHA-256 is {found}, and not {wanted}; correct models[].sha256 or the address")
    # A worker that runs keeps the old file mapped. The note follows: after an end in between the file is fetched again;
    # the other order would have the old one pass for the new.
    os.replace(partial, target)
    note(target)
    remove(f"{partial}.source")
    print(target)


if is_settled():
    sys.exit(0)
try:
    # Open until this program ends. Never removed: whoever waits for a file without a name would hold another lock than
    # the one who makes a new one.
    lock = os.open(f"{target}.lock", os.O_WRONLY | os.O_CREAT, 0o666)
    fcntl.flock(lock, fcntl.LOCK_EX)
except OSError as error:
    if is_accepted():  # on a volume that can only be read, or has no locks
        sys.exit(0)
    sys.exit(f"{target}.lock: {error}; the volume must be writable and know locks (flock), since its pods share it")
if not is_settled():
    if is_accepted():
        note(target)
    else:
        bring()
