//! The user's terminal while it is connected to a container.

use crate::error::Error;

/// Keeps the terminal in raw mode until dropped.
pub(super) struct RawTerminal(());

impl RawTerminal {
    pub(super) fn enter() -> Result<Self, Error> {
        crossterm::terminal::enable_raw_mode().map_err(Error::os("use the terminal"))?;
        Ok(Self(()))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Fails only if the terminal is gone.
        let _ = crossterm::terminal::disable_raw_mode();
    }
}

/// Returns the size in the JSON of the resize stream (`k8s.io/client-go/tools/remotecommand: TerminalSize`).
pub(super) fn size() -> Option<String> {
    let (width, height) = crossterm::terminal::size().ok()?;
    Some(format!("{{\"Width\":{width},\"Height\":{height}}}"))
}
