//! Combines configuration files with the command line of a service.
//!
//! Each field that a service honours has a flag. The value from the files becomes the flag's default, so a
//! given flag takes precedence, and the service only reads its arguments.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;

use clap::error::{ContextKind, ContextValue};
use clap::{Command, FromArgMatches, Parser};
use quintlet_kit::args::EXIT_USAGE;

use crate::arguments::{Bound, bound, defaults, flags, values};
use crate::config::Config;
use crate::diagnostics::{Diagnostic, Severity, render};
use crate::load::Sources;
use crate::node::{Data, LocatedValue};
use crate::print::{MASKED, print};
use crate::table::{Document, Row, Service};
use crate::unsupported_flags;

/// Arguments of every service that locate the configuration.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ConfigArgs {
    /// Configuration file: a KubeletConfiguration and, as a second document, a QuintletConfiguration. Flags
    /// take precedence.
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<PathBuf>,
    /// Directory of drop-in files *.conf, applied in lexical order: maps are merged, lists are replaced.
    #[arg(long, value_name = "DIR", help_heading = "Configuration")]
    pub config_dir: Option<PathBuf>,
    /// Print the configuration as YAML, each value with its origin, and exit.
    #[arg(long, help_heading = "Configuration")]
    pub print_config: bool,
    /// Treat warnings about the configuration as errors.
    #[arg(long, help_heading = "Configuration")]
    pub strict: bool,
}

/// The arguments of a service and the configuration that they are based on.
#[derive(Debug)]
pub struct Loaded<T> {
    /// The arguments, with the values of the files as defaults.
    pub args: T,
    /// The configuration.
    pub config: Config,
    service: Service,
    strict: bool,
}

impl<T> Loaded<T> {
    /// Adds problems that show only on this machine. With `--strict`, warnings are errors.
    ///
    /// # Errors
    /// Returns all problems if one is an error: the service must not start.
    pub fn with_problems(mut self, mut problems: Vec<Diagnostic>) -> Result<Self, Exit> {
        if self.strict {
            problems.iter_mut().for_each(|problem| problem.severity = Severity::Error);
        }
        if problems.iter().any(Diagnostic::is_error) {
            let warnings = self.config.warnings.into_iter();
            return Err(Exit::Invalid(warnings.chain(problems).collect()));
        }
        self.config.warnings.append(&mut problems);
        Ok(self)
    }

    /// Logs the fields of a KubeletConfiguration that the service uses, without secrets, and warnings about
    /// them. Publishes the fields on debug.v1. Call it once per process, after logging is set up.
    pub fn publish(&self) {
        let is_ours = |row: &Row| row.services().contains(&self.service);
        let ours = crate::json::document(&self.config, Document::Kubelet, is_ours);
        tracing::info!(configuration = %ours, "using configuration");
        quintlet_kit::server::set_configuration(ours.to_string());
        for warning in &self.config.warnings {
            tracing::warn!(origin = %warning.origin, field = warning.path, problem = warning.message, "configuration has a problem");
        }
        // All services read the gates: one of them reports them.
        if let Some(gates) = self.config.fixed_gates().filter(|_| self.service == Service::PodSync) {
            tracing::warn!(gates, "feature gates with a fixed value are set");
        }
        for (field, why) in self.config.ignored(self.service) {
            tracing::warn!(field, reason = why, "configured field is ignored");
        }
    }
}

/// Parses the command line and the configuration that it names.
///
/// Exits the process with code 64 after printing all errors, and with 0 for `--help`, `--version` and
/// `--print-config`.
#[must_use]
pub fn parse<T: Parser>(service: Service) -> Loaded<T> {
    match read(service, std::env::args_os().collect()) {
        Ok(loaded) => loaded,
        Err(end) => end.exit(),
    }
}

/// The reason to exit before the service starts.
#[derive(Debug)]
pub enum Exit {
    /// A message of clap: help, version or a usage error.
    Clap(clap::Error),
    /// Errors in the configuration.
    Invalid(Vec<Diagnostic>),
    /// The configuration as YAML, for `--print-config`.
    Printed(String),
}

impl Exit {
    /// Returns the exit code of the process.
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            Self::Clap(error) if !error.use_stderr() => 0,
            Self::Clap(_) | Self::Invalid(_) => EXIT_USAGE,
            Self::Printed(_) => 0,
        }
    }

    /// Prints the message and exits the process.
    pub fn exit(self) -> ! {
        let _ = match &self {
            Self::Clap(error) => error.print(),
            Self::Invalid(diagnostics) => std::io::stderr().write_all(render(diagnostics).as_bytes()),
            Self::Printed(text) => std::io::stdout().write_all(text.as_bytes()),
        };
        std::process::exit(self.code())
    }
}

/// Parses a command line, of which the first word is the program, and the configuration that it names.
///
/// # Errors
/// Returns the reason to exit, if the service must not start.
pub fn read<T: Parser>(service: Service, line: Vec<OsString>) -> Result<Loaded<T>, Exit> {
    let (command, unsupported) = unsupported_flags::add(T::command());
    let parsed = command.clone().try_get_matches_from(line.clone());
    let given = parsed.map_err(|error| Exit::Clap(without_secret(error)))?;
    let refused = unsupported.errors(&given);
    if !refused.is_empty() {
        return Err(Exit::Invalid(refused));
    }
    let own = ConfigArgs::from_arg_matches(&given).map_err(Exit::Clap)?;
    let rows = bound(&command, |services| services.contains(&service));
    let mut config = Config::load(&Sources {
        file: own.config.clone(),
        drop_ins: own.config_dir.clone(),
        flags: flags(&rows, &given).into_iter().chain(flags(&unsupported.rows, &given)).collect(),
        strict: own.strict,
        service: Some(service),
    })
    .map_err(Exit::Invalid)?;
    config.warnings.extend(unsupported.warnings(&given));
    let values = values(&rows, &config);
    let with_files = defaults(command.clone(), &values);
    let args = with_files
        .try_get_matches_from(line)
        .and_then(|matches| T::from_arg_matches(&matches))
        .map_err(|error| {
            let rejected = rejected_values(&command, &values);
            rejected.map_or_else(|| Exit::Clap(without_secret(error)), Exit::Invalid)
        })?;
    if own.print_config {
        // A closed stderr cannot be reported anywhere.
        let _ = std::io::stderr().write_all(render(&config.warnings).as_bytes());
        return Err(Exit::Printed(print(&config)));
    }
    Ok(Loaded { args, config, service, strict: own.strict })
}

/// Hides the value in an error about a flag whose values are secret.
fn without_secret(mut error: clap::Error) -> clap::Error {
    let mut rows = Document::ALL.into_iter().flat_map(|document| document.rows());
    let is_secret = match error.get(ContextKind::InvalidArg) {
        // `--manifest-url-header <HEADER>`.
        Some(ContextValue::String(arg)) => rows.any(|row| {
            row.secret && arg.split_whitespace().next().and_then(|flag| flag.strip_prefix("--")) == row.flag()
        }),
        _ => false,
    };
    if is_secret {
        error.insert(ContextKind::InvalidValue, ContextValue::String(MASKED.to_owned()));
    }
    error
}

/// An argument does not have the form `key=value`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be key=value")]
pub struct InvalidPair;

/// Parses an argument of the form `key=value`.
///
/// # Errors
/// Fails if the argument has no `=` or no key.
pub fn pair(text: &str) -> Result<(String, String), InvalidPair> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        Some(_) | None => Err(InvalidPair),
    }
}

/// Returns an error for each value from a file that its argument rejects. Returns `None` if no value from a
/// file is rejected.
fn rejected_values(command: &Command, values: &[(&Bound, &LocatedValue)]) -> Option<Vec<Diagnostic>> {
    let program = command.get_name().to_owned();
    let diagnostics: Vec<Diagnostic> = values
        .iter()
        .filter(|(_, node)| matches!(node.origin, crate::node::Origin::File(..)))
        .filter_map(|(bound, node)| {
            let alone = defaults(command.clone(), &[(bound, node)]);
            let error = alone.try_get_matches_from([&program]).err()?;
            let why =
                std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
            let value = match &node.data {
                Data::List(_) | Data::Map(_) => String::new(),
                data => format!("{data}: "),
            };
            Some(Diagnostic::error(node.origin.clone(), bound.row.field, format!("{value}{why}")))
        })
        .collect();
    (!diagnostics.is_empty()).then_some(diagnostics)
}
