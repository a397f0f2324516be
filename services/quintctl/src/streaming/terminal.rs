//! The user's terminal while a container has it.

use crate::error::Error;

/// Raw mode, until dropped.
pub(super) struct Raw(());

impl Raw {
    pub(super) fn enter() -> Result<Self, Error> {
        crossterm::terminal::enable_raw_mode().map_err(Error::os("use the terminal"))?;
        Ok(Self(()))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing back.
        let _ = crossterm::terminal::disable_raw_mode();
    }
}

/// The size as the streaming protocol wants it.
pub(super) fn size() -> Option<String> {
    let (width, height) = crossterm::terminal::size().ok()?;
    Some(format!("{{\"Width\":{width},\"Height\":{height}}}"))
}
