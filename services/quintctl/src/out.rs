//! Standard output, in the form asked for.

use std::io::Write as _;

use serde::Serialize;

use crate::error::Error;

/// Form of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Format {
    /// For reading
    #[default]
    Table,
    /// For reading, with more columns
    Wide,
    /// For programs
    Json,
    /// For programs and people
    Yaml,
}

impl Format {
    /// An answer in this form: as `screen` writes it, or as data. `wide` is the argument of `screen`.
    ///
    /// # Errors
    /// The data cannot be written in this form.
    pub fn render(self, data: &impl Serialize, screen: impl FnOnce(bool) -> String) -> Result<String, Error> {
        match self {
            Self::Table => Ok(screen(false)),
            Self::Wide => Ok(screen(true)),
            Self::Json => {
                let text = serde_json::to_string_pretty(data).map_err(|e| Error::Form(e.to_string()))?;
                Ok(text + "\n")
            }
            Self::Yaml => serde_saphyr::to_string(data).map_err(|e| Error::Form(e.to_string())),
        }
    }

    /// One of many answers, on one line (or as one YAML document).
    ///
    /// # Errors
    /// The data cannot be written in this form.
    pub fn render_line(
        self,
        data: &impl Serialize,
        screen: impl FnOnce(bool) -> String,
    ) -> Result<String, Error> {
        match self {
            Self::Json => Ok(serde_json::to_string(data).map_err(|e| Error::Form(e.to_string()))? + "\n"),
            Self::Yaml => Ok(format!("---\n{}", self.render(data, screen)?)),
            Self::Table | Self::Wide => self.render(data, screen),
        }
    }
}

/// Writes to standard output at once.
///
/// # Errors
/// It cannot be written to, or is closed.
pub fn print(bytes: impl AsRef<[u8]>) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes.as_ref()).and_then(|()| out.flush()).map_err(Error::os("write to standard output"))
}
