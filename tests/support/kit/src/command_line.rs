//! Compares the command line of a service with the table of configuration fields.

use clap::Command;
use quintlet_config::table::Document;
use quintlet_config::table::Service;

/// Returns the differences between the table of configuration fields and the command line of a service.
#[must_use]
pub fn differences(command: &Command, service: Service) -> Vec<String> {
    let mut differences = Vec::new();
    let rows = Document::ALL.into_iter().flat_map(Document::rows);
    for row in rows.filter(|r| r.services().contains(&service)) {
        let Some(flag) = row.flag() else { continue };
        let Some(arg) = command.get_arguments().find(|a| a.get_long() == Some(flag)) else {
            differences.push(format!("{}: there is no flag --{flag}", row.field));
            continue;
        };
        let names: Vec<&str> =
            arg.get_long().into_iter().chain(arg.get_all_aliases().unwrap_or_default()).collect();
        if row.kubelet_flag.is_some_and(|f| !names.contains(&f)) {
            differences.push(format!("{}: --{flag} does not have the kubelet's name as an alias", row.field));
        }
        let given: Vec<String> =
            arg.get_default_values().iter().map(|v| v.to_string_lossy().into_owned()).collect();
        let arg_default = row.kind.canonical(row.kind.from_flag(&given, flag));
        let same = match row.default_node() {
            Some(default) => default.equals(&arg_default),
            None => given.is_empty() || row.kind.is_zero(&arg_default),
        };
        if !same {
            differences.push(format!("{}: default {:?}, but --{flag} has {given:?}", row.field, row.default));
        }
    }
    differences
}
