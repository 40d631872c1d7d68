"""Import of images: disks in other forms become raw files with a digest."""
