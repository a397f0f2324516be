//! quintctl: see ARCHITECTURE.md.
