//! status-reporter: see ARCHITECTURE.md.
