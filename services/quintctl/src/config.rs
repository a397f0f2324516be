//! `quintctl config`: the effective configuration of the services.

use std::io::Write as _;
use std::path::PathBuf;

use quintlet_config::diagnostics::render;
use quintlet_config::{Config, Sources};

use crate::error::Error;
use crate::out::print;

/// Show the effective configuration, with the origin of each value. An invalid configuration is reported with
/// all errors and exit code 64.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct ConfigArgs {
    /// Configuration file [default: show the defaults]
    #[arg(value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Directory of drop-in files *.conf, merged in lexical order
    #[arg(long, value_name = "DIR")]
    pub(crate) config_dir: Option<PathBuf>,
    /// Treat warnings as errors
    #[arg(long)]
    pub(crate) strict: bool,
}

/// Prints the effective configuration. Returns false if the configuration is invalid; its errors are on
/// standard error.
///
/// # Errors
/// Standard output or standard error is closed.
pub(crate) fn run(args: ConfigArgs) -> Result<bool, Error> {
    let sources =
        Sources { file: args.file, drop_ins: args.config_dir, strict: args.strict, ..Sources::default() };
    let loaded = Config::load(&sources);
    let report = match &loaded {
        Ok(config) => render(&config.warnings),
        Err(diagnostics) => render(diagnostics),
    };
    std::io::stderr().write_all(report.as_bytes()).map_err(Error::os("write to standard error"))?;
    let Ok(config) = loaded else { return Ok(false) };
    print(quintlet_config::print::print(&config))?;
    Ok(true)
}
