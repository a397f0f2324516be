//! A reason not to install.

/// A reason not to begin.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// One line that names the cause and what to do.
    pub text: String,
    /// Exit code that stands for it.
    pub code: u8,
}
