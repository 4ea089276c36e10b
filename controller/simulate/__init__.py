"""The simulator: scenarios played on virtual time through the controller's own core. Standard library only."""
