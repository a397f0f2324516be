//! Combines configuration files with the command line of a service.
//!
//! Each field that a service honours has a flag. The value from the files becomes the flag's default, so a given flag takes
//! precedence, and the service only reads its arguments.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches, Parser};
use quintlet_kit::args::EXIT_USAGE;

use crate::load::{Config, Sources};
use crate::mistakes::{Mistake, render};
use crate::node::{Data, Node};
use crate::print::print;
use crate::table::{Document, Row, Service};
use crate::unsupported_flags;

/// Arguments of every service that locate the configuration.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ConfigArgs {
    /// Configuration file: a KubeletConfiguration and, as a second document, a QuintletConfiguration. Flags take precedence.
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
    unsupported: Vec<(&'static str, &'static str)>,
}

impl<T> Loaded<T> {
    /// Logs warnings about the configuration and publishes it on debug.v1. Call it once per process, after logging is set up.
    pub fn publish(&self) {
        let is_ours = |row: &Row| row.services().contains(&self.service);
        let ours = crate::json::document(&self.config, Document::Kubelet, is_ours);
        quintlet_kit::server::set_configuration(ours.to_string());
        for (flag, until) in &self.unsupported {
            tracing::warn!("--{flag} is not supported yet: {until}");
        }
        for warning in &self.config.warnings {
            tracing::warn!(origin = %warning.origin, "configuration: {}", warning.text());
        }
        if let Some(fields) = self.config.not_yet(self.service) {
            tracing::warn!("configuration: set, but not supported yet: {fields}");
        }
        for (field, why) in self.config.ignored(self.service) {
            tracing::warn!("configuration: {field} is ignored: {why}");
        }
    }

    /// Returns the given flags of the kubelet that have no effect yet, each with the behaviour until then.
    #[must_use]
    pub fn unsupported_flags(&self) -> &[(&'static str, &'static str)] {
        &self.unsupported
    }
}

/// Parses the command line and the configuration that it names.
///
/// Exits the process with code 64 after printing all errors, and with 0 for `--help`, `--version` and `--print-config`.
#[must_use]
pub fn parse<T: Parser>(service: Service) -> Loaded<T> {
    match read(service, std::env::args_os().collect()) {
        Ok(loaded) => loaded,
        Err(end) => end.exit(),
    }
}

/// The reason to exit before the service starts.
#[derive(Debug)]
pub enum End {
    /// A message of clap: help, version or a usage error.
    Clap(clap::Error),
    /// Errors in the configuration.
    Mistakes(Vec<Mistake>),
    /// The configuration as YAML, for `--print-config`.
    Printed(String),
}

impl End {
    /// Returns the exit code of the process.
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            Self::Clap(error) if !error.use_stderr() => 0,
            Self::Clap(_) | Self::Mistakes(_) => EXIT_USAGE,
            Self::Printed(_) => 0,
        }
    }

    /// Prints the message and exits the process.
    pub fn exit(self) -> ! {
        let _ = match &self {
            Self::Clap(error) => error.print(),
            Self::Mistakes(mistakes) => std::io::stderr().write_all(render(mistakes).as_bytes()),
            Self::Printed(text) => std::io::stdout().write_all(text.as_bytes()),
        };
        std::process::exit(self.code())
    }
}

/// Parses a command line, of which the first word is the program, and the configuration that it names.
///
/// # Errors
/// Returns the reason to exit, if the service must not start.
pub fn read<T: Parser>(service: Service, line: Vec<OsString>) -> Result<Loaded<T>, End> {
    let (command, unsupported) = unsupported_flags::add(T::command());
    let given = command.clone().try_get_matches_from(line.clone()).map_err(End::Clap)?;
    let refused = unsupported.mistakes(&given);
    if !refused.is_empty() {
        return Err(End::Mistakes(refused));
    }
    let own = ConfigArgs::from_arg_matches(&given).map_err(End::Clap)?;
    let rows = bound(&command, |services| services.contains(&service));
    let config = Config::load(&Sources {
        file: own.config.clone(),
        drop_ins: own.config_dir.clone(),
        flags: flags(&rows, &given).into_iter().chain(flags(&unsupported.rows, &given)).collect(),
        strict: own.strict,
    })
    .map_err(End::Mistakes)?;
    let values = values(&rows, &config);
    let with_files = defaults(command.clone(), &values);
    let args = with_files
        .try_get_matches_from(line)
        .and_then(|matches| T::from_arg_matches(&matches))
        .map_err(|error| culprits(&command, &values).map_or(End::Clap(error), End::Mistakes))?;
    if own.print_config {
        // A closed stderr cannot be reported anywhere.
        let _ = std::io::stderr().write_all(render(&config.warnings).as_bytes());
        return Err(End::Printed(print(&config)));
    }
    Ok(Loaded { args, config, service, unsupported: unsupported.not_yet(&given) })
}

/// Parses an argument of the form `key=value`.
///
/// # Errors
/// Fails if the argument has no `=` or no key.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        Some(_) | None => Err("want key=value".to_owned()),
    }
}

/// A field and the argument for it.
#[derive(Debug, Clone)]
pub struct Bound {
    /// The document of the field.
    pub document: Document,
    /// The field.
    pub row: &'static Row,
    /// Id of the argument in clap.
    pub id: String,
}

/// Returns the fields for which a command has arguments. `wanted` filters them by the services that honour them.
#[must_use]
pub fn bound(command: &Command, wanted: impl Fn(&[Service]) -> bool) -> Vec<Bound> {
    let rows = Document::ALL.into_iter().flat_map(|d| d.rows().iter().map(move |r| (d, r)));
    rows.filter(|(_, row)| wanted(row.services()))
        .filter_map(|(document, row)| {
            let flag = row.flag()?;
            let arg = command.get_arguments().find(|a| a.get_long() == Some(flag))?;
            Some(Bound { document, row, id: arg.get_id().to_string() })
        })
        .collect()
}

/// Returns the differences between the table of fields and a service's command line, for a test in every service.
#[must_use]
pub fn problems(command: &Command, service: Service) -> Vec<String> {
    let mut problems = Vec::new();
    let rows = Document::ALL.into_iter().flat_map(Document::rows);
    for row in rows.filter(|r| r.services().contains(&service)) {
        let Some(flag) = row.flag() else { continue };
        let Some(arg) = command.get_arguments().find(|a| a.get_long() == Some(flag)) else {
            problems.push(format!("{}: there is no flag --{flag}", row.field));
            continue;
        };
        let names: Vec<&str> =
            arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default()).collect();
        if row.kubelet_flag.is_some_and(|f| !names.contains(&f)) {
            problems.push(format!("{}: --{flag} does not have the kubelet's name as an alias", row.field));
        }
        let given: Vec<String> =
            arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
        let arg_default = row.kind.canonical(row.kind.from_flag(&given, flag));
        let same = match row.default_node() {
            Some(default) => default.equals(&arg_default),
            None => given.is_empty() || row.kind.is_zero(&arg_default),
        };
        if !same {
            problems.push(format!("{}: default {:?}, but --{flag} has {given:?}", row.field, row.default));
        }
    }
    problems
}

/// Returns the fields that were given by flags, with their values.
#[must_use]
pub fn flags(rows: &[Bound], given: &ArgMatches) -> Vec<(Document, &'static Row, Node)> {
    rows.iter()
        .filter(|b| given.value_source(&b.id) == Some(ValueSource::CommandLine))
        .map(|b| {
            let raw = given.get_raw(&b.id).into_iter().flatten();
            let raw: Vec<String> = raw.map(|v| v.to_string_lossy().into_owned()).collect();
            let flag = format!("--{}", b.row.flag().unwrap_or_default());
            (b.document, b.row, b.row.kind.from_flag(&raw, &flag))
        })
        .collect()
}

/// Returns the configured values of arguments. Fields that are not set are omitted, so that the argument's own default applies.
#[must_use]
pub fn values<'a>(rows: &'a [Bound], config: &'a Config) -> Vec<(&'a Bound, &'a Node)> {
    rows.iter()
        .filter_map(|b| Some((b, config.value(b.document, b.row.field)?)))
        .filter(|(_, node)| node.origin != crate::node::Origin::Default)
        .collect()
}

/// Returns the command with the given values as defaults of its arguments.
#[must_use]
pub fn defaults(command: Command, values: &[(&Bound, &Node)]) -> Command {
    values.iter().fold(command, |command, (bound, node)| {
        let values: Vec<OsString> = bound.row.kind.to_flag(node).into_iter().map(OsString::from).collect();
        command.mut_arg(&bound.id, |arg| arg.default_values(values))
    })
}

/// Returns an error for each value from a file that its argument rejects. Returns `None` if no value from a file is rejected.
fn culprits(command: &Command, values: &[(&Bound, &Node)]) -> Option<Vec<Mistake>> {
    let program = command.get_name().to_owned();
    let mistakes: Vec<Mistake> = values
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
            Some(Mistake::error(node.origin.clone(), bound.row.field, format!("{value}{why}")))
        })
        .collect();
    (!mistakes.is_empty()).then_some(mistakes)
}
