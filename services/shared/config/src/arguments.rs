//! The arguments of a command for the fields of the configuration: values from flags to fields, and from
//! fields to defaults of flags.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

use crate::config::Config;
use crate::node::LocatedValue;
use crate::table::{Document, Row, Service};

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

/// Returns the fields for which a command has arguments. `wanted` filters them by the services that honour
/// them.
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

/// Returns the fields that were given by flags, with their values.
#[must_use]
pub fn flags(rows: &[Bound], given: &ArgMatches) -> Vec<(Document, &'static Row, LocatedValue)> {
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

/// Returns the configured values of arguments. Fields that are not set are omitted, so that the argument's
/// own default applies.
#[must_use]
pub fn values<'a>(rows: &'a [Bound], config: &'a Config) -> Vec<(&'a Bound, &'a LocatedValue)> {
    rows.iter()
        .filter_map(|b| Some((b, config.value(b.document, b.row.field)?)))
        .filter(|(_, node)| node.origin != crate::node::Origin::Default)
        .collect()
}

/// Returns the command with the given values as defaults of its arguments.
#[must_use]
pub fn defaults(command: Command, values: &[(&Bound, &LocatedValue)]) -> Command {
    values.iter().fold(command, |command, (bound, node)| {
        let values: Vec<OsString> = bound.row.kind.to_flag(node).into_iter().map(OsString::from).collect();
        command.mut_arg(&bound.id, |arg| arg.default_values(values))
    })
}
