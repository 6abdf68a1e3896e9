"""The container image that scripts/image makes: its parts by the OCI image specification, and the program run from its root
file system as an engine runs it: as its own user, read-only.

Running it needs root, for namespaces of mounts and processes; making it needs Debian 12.
"""

import hashlib
import json
import os
import pathlib
import subprocess
import tarfile
import time
import urllib.error
import urllib.request

import pytest
from conftest import BINARY, REPO, free_port

ENTER = """
root=$1; shift
mount --bind "$root" "$root" && mount -o remount,ro,bind "$root"
mount -t tmpfs -o uid=10001,gid=10001,mode=700 none "$root/var/lib/stillhouse"
mount -t tmpfs none "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
cp -r "$root/given/." "$root/var/lib/stillhouse/"
exec /usr/sbin/chroot --userspec=10001:10001 "$root" "$@"
"""


class Image:
    """An unpacked image: its configuration, and the root file system."""

    def __init__(self, archive, folder):
        with tarfile.open(archive) as tar:
            tar.extractall(folder / "layout", filter="data")
        self.layout, self.root = folder / "layout", folder / "root"
        index = json.loads((self.layout / "index.json").read_text())
        (self.named,) = index["manifests"]
        self.manifest = json.loads(self.blob(self.named))
        self.config = json.loads(self.blob(self.manifest["config"]))
        self.root.mkdir()
        for layer in self.manifest["layers"]:
            self.blob(layer)
            subprocess.run(["tar", "xzpf", self.path(layer), "-C", self.root], check=True)
        (self.root / "given").mkdir()

    def path(self, descriptor):
        return self.layout / "blobs/sha256" / descriptor["digest"].partition(":")[2]

    def blob(self, descriptor):
        content = self.path(descriptor).read_bytes()
        assert len(content) == descriptor["size"]
        assert "sha256:" + hashlib.sha256(content).hexdigest() == descriptor["digest"]
        return content

    def start(self, *args):
        config = self.config["config"]
        environment = dict(variable.split("=", 1) for variable in config["Env"])
        return subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", ENTER, "sh", self.root, *config["Entrypoint"], *args],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )

    def run(self, *args):
        process = self.start(*args)
        out, _ = process.communicate(timeout=300)
        return process.returncode, out


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    if "VERSION_CODENAME=bookworm" not in pathlib.Path("/etc/os-release").read_text():
        pytest.skip("the image is made of Debian 12's packages, on Debian 12")
    folder = tmp_path_factory.mktemp("image")
    archive = folder / "image.oci.tar"
    subprocess.run([REPO / "scripts/image", "--program", BINARY, "--out", archive], check=True)
    return Image(archive, folder)


@pytest.fixture
def engine():
    if os.geteuid() or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        pytest.skip("no right to namespaces of mounts and processes here")


def test_the_parts_are_those_of_the_specification(image):
    assert json.loads((image.layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    assert image.named["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    for layer, diff_id in zip(image.manifest["layers"], image.config["rootfs"]["diff_ids"], strict=True):
        unpacked = subprocess.run(["gzip", "-dc", image.path(layer)], check=True, capture_output=True).stdout
        assert "sha256:" + hashlib.sha256(unpacked).hexdigest() == diff_id
    assert image.config["config"]["User"] == "10001:10001"
    # what a stranger could change, or run as another user
    for path in image.root.rglob("*"):
        if not path.is_symlink() and path.name not in ("tmp", "given"):
            assert not path.stat().st_mode & 0o6022, path
    assert (image.root / "etc/ssl/certs/ca-certificates.crt").read_text().count("BEGIN CERTIFICATE") > 100


def test_the_demo_runs_read_only_as_its_own_user(image, engine):
    code, out = image.run("demo", "/var/lib/stillhouse/demo")
    assert code == 0 and "\npassed\n" in out and "rank" in out, out


def test_the_service_answers_from_it(image, engine):
    port = free_port()
    config = {"listen": f"127.0.0.1:{port}", "data": "/var/lib/stillhouse/data", "auth": "token"}
    (image.root / "given/service.yaml").write_text(json.dumps(config))
    server = image.start("serve", "--config", "/var/lib/stillhouse/service.yaml")
    try:
        for _ in range(600):
            assert server.poll() is None, server.stdout.read()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/ready", timeout=5) as answer:
                    assert json.load(answer) == {"status": "ready"}
                    break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        else:
            pytest.fail("the service does not answer")
    finally:
        server.kill()
        server.wait()
