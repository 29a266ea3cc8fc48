"""What the packages of the workbench share and is no kernel. It imports none of them."""
