//! The operator's tool: see ARCHITECTURE.md.

pub mod image;
pub mod up;
