"""NetBox and MAAS: tags state the intended use of a machine; state is written back."""
