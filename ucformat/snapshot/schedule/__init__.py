"""What a rank does when, and where it idles. The planner and the snapshotter use it; it copies nothing."""
