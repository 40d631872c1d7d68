"""Virtual slice hosts: QEMU machines that look to Linux like the GPU servers we sell slices of."""
