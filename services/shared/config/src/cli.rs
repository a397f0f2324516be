//! Between the configuration and a command line.
//!
//! A field that a service honours has a flag there. What the files say becomes that flag's default value, so a flag that
//! is given wins, and the service sees nothing but its arguments.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command, FromArgMatches, Parser};
use quintlet_kit::args::EXIT_USAGE;

use crate::foreign;
use crate::load::{Config, Sources};
use crate::mistakes::{Mistake, render};
use crate::node::{Data, Node};
use crate::print::print;
use crate::table::{Document, Row, Service};

/// Where the configuration is, on every command line.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ConfigArgs {
    /// Configuration file: a KubeletConfiguration and, as a second document, a QuintletConfiguration. Flags win over it.
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<PathBuf>,
    /// Directory of files *.conf that change it, in lexical order: maps merge, lists replace.
    #[arg(long, value_name = "DIR", help_heading = "Configuration")]
    pub config_dir: Option<PathBuf>,
    /// Print the configuration as YAML, each value with where it came from, and end.
    #[arg(long, help_heading = "Configuration")]
    pub print_config: bool,
    /// Warnings about the configuration are errors.
    #[arg(long, help_heading = "Configuration")]
    pub strict: bool,
}

/// A command line with the values of the files, and what was read.
#[derive(Debug)]
pub struct Loaded<T> {
    /// The arguments.
    pub args: T,
    /// The configuration behind them.
    pub config: Config,
    service: Service,
    foreign: Vec<(&'static str, &'static str)>,
}

impl<T> Loaded<T> {
    /// Logs what should be mended and what has no effect: once per process, after logging was set up. Whoever asks the process from
    /// now on is told what it runs with.
    pub fn tell(&self) {
        let is_ours = |row: &Row| row.services().contains(&self.service);
        let ours = crate::json::document(&self.config, Document::Kubelet, is_ours);
        quintlet_kit::server::set_configuration(ours.to_string());
        for (flag, until) in &self.foreign {
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

    /// Flags of the kubelet that were given and have no effect yet, with what happens until then.
    #[must_use]
    pub fn foreign(&self) -> &[(&'static str, &'static str)] {
        &self.foreign
    }
}

/// Reads the command line and the configuration it names.
///
/// Ends the process where there is nothing to run: with code 64 after telling all mistakes, with 0 for `--help`,
/// `--version` and `--print-config`.
#[must_use]
pub fn parse<T: Parser>(service: Service) -> Loaded<T> {
    match read(service, std::env::args_os().collect()) {
        Ok(loaded) => loaded,
        Err(end) => end.exit(),
    }
}

/// Why a process ends before it began.
#[derive(Debug)]
pub enum End {
    /// What clap has to say: help, version, a usage error.
    Clap(clap::Error),
    /// Mistakes in the configuration.
    Mistakes(Vec<Mistake>),
    /// The configuration was asked for.
    Printed(String),
}

impl End {
    /// The code to exit with.
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            Self::Clap(error) if !error.use_stderr() => 0,
            Self::Clap(_) | Self::Mistakes(_) => EXIT_USAGE,
            Self::Printed(_) => 0,
        }
    }

    /// Says it and ends the process.
    pub fn exit(self) -> ! {
        let _ = match &self {
            Self::Clap(error) => error.print(),
            Self::Mistakes(mistakes) => std::io::stderr().write_all(render(mistakes).as_bytes()),
            Self::Printed(text) => std::io::stdout().write_all(text.as_bytes()),
        };
        std::process::exit(self.code())
    }
}

/// Reads a command line, its first word the program, and the configuration it names.
///
/// # Errors
/// There is nothing to run.
pub fn read<T: Parser>(service: Service, line: Vec<OsString>) -> Result<Loaded<T>, End> {
    let (command, foreign) = foreign::add(T::command());
    let given = command.clone().try_get_matches_from(line.clone()).map_err(End::Clap)?;
    let refused = foreign.mistakes(&given);
    if !refused.is_empty() {
        return Err(End::Mistakes(refused));
    }
    let own = ConfigArgs::from_arg_matches(&given).map_err(End::Clap)?;
    let rows = bound(&command, |services| services.contains(&service));
    let config = Config::load(&Sources {
        file: own.config.clone(),
        drop_ins: own.config_dir.clone(),
        flags: flags(&rows, &given).into_iter().chain(flags(&foreign.rows, &given)).collect(),
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
        // Where nobody reads, there is nobody to tell.
        let _ = std::io::stderr().write_all(render(&config.warnings).as_bytes());
        return Err(End::Printed(print(&config)));
    }
    Ok(Loaded { args, config, service, foreign: foreign.not_yet(&given) })
}

/// `key=value`, for the command lines.
///
/// # Errors
/// There is no key.
pub fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        Some(_) | None => Err("want key=value".to_owned()),
    }
}

/// A field with the argument that carries it.
#[derive(Debug, Clone)]
pub struct Bound {
    /// Which document.
    pub document: Document,
    /// The field.
    pub row: &'static Row,
    /// Id of clap's argument.
    pub id: String,
}

/// The fields a command has arguments for, of the rows whose services pass the filter.
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

/// Where the table and a service's command line differ; for a test in every service.
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

/// What was given by flags.
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

/// What the files say, as values of arguments. Fields that nobody set are left to the command line's own defaults.
#[must_use]
pub fn values<'a>(rows: &'a [Bound], config: &'a Config) -> Vec<(&'a Bound, &'a Node)> {
    rows.iter()
        .filter_map(|b| Some((b, config.value(b.document, b.row.field)?)))
        .filter(|(_, node)| node.origin != crate::node::Origin::Default)
        .collect()
}

/// The command with these values as defaults.
#[must_use]
pub fn defaults(command: Command, values: &[(&Bound, &Node)]) -> Command {
    values.iter().fold(command, |command, (bound, node)| {
        let values: Vec<OsString> = bound.row.kind.to_flag(node).into_iter().map(OsString::from).collect();
        command.mut_arg(&bound.id, |arg| arg.default_values(values))
    })
}

/// The values of files that an argument refuses, as mistakes; none where it was not the files.
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
