//! Output formats and standard output.

use std::io::Write as _;

use serde::Serialize;

use crate::error::Error;

/// Output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum Format {
    /// A table
    #[default]
    Table,
    /// A table with more columns
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
}

impl Format {
    pub(crate) fn render(
        self,
        data: &impl Serialize,
        screen: impl FnOnce(bool) -> String,
    ) -> Result<String, Error> {
        match self {
            Self::Table => Ok(screen(false)),
            Self::Wide => Ok(screen(true)),
            Self::Json => {
                let text = serde_json::to_string_pretty(data).map_err(|e| Error::Serialize(e.to_string()))?;
                Ok(text + "\n")
            }
            Self::Yaml => serde_saphyr::to_string(data).map_err(|e| Error::Serialize(e.to_string())),
        }
    }

    /// Formats one message of a stream: JSON on one line, YAML as one document, or the text of `screen`.
    ///
    /// # Errors
    /// The data cannot be serialized.
    pub(crate) fn render_line(
        self,
        data: &impl Serialize,
        screen: impl FnOnce(bool) -> String,
    ) -> Result<String, Error> {
        match self {
            Self::Json => {
                Ok(serde_json::to_string(data).map_err(|e| Error::Serialize(e.to_string()))? + "\n")
            }
            Self::Yaml => Ok(format!("---\n{}", self.render(data, screen)?)),
            Self::Table | Self::Wide => self.render(data, screen),
        }
    }
}

/// Writes to standard output and flushes it.
///
/// # Errors
/// Standard output is closed, or the write fails.
pub(crate) fn print(bytes: impl AsRef<[u8]>) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    out.write_all(bytes.as_ref()).and_then(|()| out.flush()).map_err(Error::os("write to standard output"))
}
