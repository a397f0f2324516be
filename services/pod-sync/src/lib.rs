//! pod-sync: see ARCHITECTURE.md.
