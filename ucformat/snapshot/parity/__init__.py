"""XOR parity of slots of ranks on different hosts: who forms a group, which bytes make which stripe, a lost slot computed."""
