"""Test certificates made by the openssl program: an authority, and what it signs."""

import os
import subprocess


def openssl(*args):
    subprocess.run(["openssl", *args], check=True, capture_output=True)


class Authority:
    """A certificate authority in a folder of its own."""

    def __init__(self, folder, name):
        self.folder = os.path.join(folder, name)
        os.mkdir(self.folder)
        self.cert = os.path.join(self.folder, "ca.pem")
        self.key = os.path.join(self.folder, "ca.key")
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
                "-keyout", self.key, "-out", self.cert, "-subj", "/CN=" + name)

    def sign(self, name, days=2):
        """Returns the paths of a certificate for localhost and of its key."""
        key, request, cert, extension = (os.path.join(self.folder, name + end)
                                         for end in (".key", ".csr", ".pem", ".ext"))
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key, "-out",
                request, "-subj", "/CN=" + name)
        with open(extension, "w") as file:
            file.write("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        openssl("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key, "-CAcreateserial", "-days",
                str(days), "-out", cert, "-extfile", extension)
        return cert, key


def read(path):
    with open(path, "rb") as file:
        return file.read()
