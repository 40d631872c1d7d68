"""Virtual slice hosts: QEMU machines that Linux sees as GPU servers."""
