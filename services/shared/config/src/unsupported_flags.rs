//! Flags of the kubelet that a service does not support, but that a unit file written for a kubelet may
//! contain.
//!
//! They are hidden arguments of every command. A flag for a field without an effect sets that field, and the
//! configuration warns about it. A refused flag is an error with a reason.

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};

use crate::arguments::Bound;
use crate::diagnostics::Diagnostic;
use crate::kind::Kind;
use crate::node::Origin;
use crate::table::{Document, FLAGS, FieldSupport, FlagSupport};

/// The unsupported flags that were added to a command.
#[derive(Debug)]
pub(crate) struct UnsupportedFlags {
    /// Fields with a flag and without an effect.
    pub(crate) rows: Vec<Bound>,
    others: Vec<(&'static str, FlagSupport)>,
}

/// Adds the kubelet's flags that the command does not have as hidden arguments.
pub(crate) fn add(mut command: Command) -> (Command, UnsupportedFlags) {
    let mut unsupported = UnsupportedFlags { rows: Vec::new(), others: Vec::new() };
    for row in Document::Kubelet.rows() {
        let Some(flag) = row.kubelet_flag.filter(|flag| !has(&command, flag)) else { continue };
        match row.support {
            FieldSupport::Ignored { .. } => {
                command = command.arg(hidden(flag, matches!(row.kind, Kind::Bool)));
                unsupported.rows.push(Bound { document: Document::Kubelet, row, id: flag.to_owned() });
            }
            // The field is honoured by another service only, or refused wherever it is set.
            FieldSupport::Honoured { .. } | FieldSupport::Refused { .. } => {}
        }
    }
    for row in FLAGS.iter().filter(|row| !matches!(row.support, FlagSupport::Same)) {
        if !has(&command, row.name) {
            command = command.arg(hidden(row.name, row.is_switch));
            unsupported.others.push((row.name, row.support));
        }
    }
    (command, unsupported)
}

fn has(command: &Command, flag: &str) -> bool {
    let is =
        |arg: &Arg| arg.get_long() == Some(flag) || arg.get_all_aliases().unwrap_or_default().contains(&flag);
    command.get_arguments().any(is)
}

fn hidden(flag: &'static str, is_switch: bool) -> Arg {
    let arg = Arg::new(flag).long(flag).hide(true).action(ArgAction::Append);
    if is_switch {
        arg.num_args(0..=1).require_equals(true).default_missing_value("true")
    } else {
        arg.num_args(1).allow_hyphen_values(true)
    }
}

impl UnsupportedFlags {
    /// Returns an error for each given flag that is refused.
    pub(crate) fn errors(&self, given: &ArgMatches) -> Vec<Diagnostic> {
        let refused = |(name, support): &(&'static str, FlagSupport)| {
            let why = match support {
                FlagSupport::Refused(why) => (*why).to_owned(),
                FlagSupport::Instead(what) => format!("write instead: {what}"),
                FlagSupport::Same | FlagSupport::Ignored(_) => return None,
            };
            is_given(given, name).then(|| {
                Diagnostic::error(Origin::Flag(format!("--{name}").into()), format!("--{name}"), why)
            })
        };
        self.others.iter().filter_map(refused).collect()
    }

    /// Returns a warning for each given flag without a field that has no effect.
    pub(crate) fn warnings(&self, given: &ArgMatches) -> Vec<Diagnostic> {
        let ignored = |(name, support): &(&'static str, FlagSupport)| {
            let FlagSupport::Ignored(why) = support else { return None };
            is_given(given, name).then(|| {
                let text = format!("has no effect: {why}");
                Diagnostic::warning(Origin::Flag(format!("--{name}").into()), format!("--{name}"), text)
            })
        };
        self.others.iter().filter_map(ignored).collect()
    }
}

/// Returns whether a flag is given with a value. A flag with an empty value, such as `--lock-file=`, has no
/// effect.
fn is_given(given: &ArgMatches, name: &str) -> bool {
    given.value_source(name) == Some(ValueSource::CommandLine)
        && given.get_raw(name).into_iter().flatten().any(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::cli::{ConfigArgs, Exit, Loaded, read};
    use crate::kind::Kind;
    use crate::table::{Document, FieldSupport, Service};

    #[derive(Debug, Parser)]
    struct Bare {
        #[command(flatten)]
        config: ConfigArgs,
    }

    fn line(words: &[&str]) -> Result<Loaded<Bare>, Exit> {
        read(Service::PodSync, [&["x"], words].concat().into_iter().map(Into::into).collect())
    }

    #[test]
    fn a_flag_without_an_effect_does_not_prevent_a_start() {
        for row in Document::Kubelet.rows() {
            let FieldSupport::Ignored { .. } = row.support else { continue };
            let Some(flag) = row.kubelet_flag else { continue };
            let flag = format!("--{flag}");
            let words = match row.kind {
                Kind::Bool => vec![flag.as_str()],
                _ => vec![flag.as_str(), row.default.trim_matches('"')],
            };
            assert!(!matches!(line(&words), Err(Exit::Clap(_))), "{words:?}");
        }
    }

    #[test]
    fn flags_of_cadvisor_that_kubelet_1_37_keeps_cause_a_warning_and_the_others_are_refused() {
        let loaded = line(&["--housekeeping-interval=30s", "--max-housekeeping-interval", "1m"]).unwrap();
        let warnings = crate::diagnostics::render(&loaded.config.warnings);
        for flag in ["--housekeeping-interval", "--max-housekeeping-interval"] {
            let text = format!("{flag}: has no effect: cgroups are read when figures are requested");
            assert!(warnings.contains(&text), "{warnings}");
        }
        assert!(!crate::diagnostics::render(&line(&[]).unwrap().config.warnings).contains("cAdvisor"));
        let Err(Exit::Invalid(diagnostics)) = line(&["--boot-id-file=/b", "--enable-load-reader"]) else {
            panic!("removed flags")
        };
        let text = crate::diagnostics::render(&diagnostics);
        for flag in ["--boot-id-file", "--enable-load-reader"] {
            let refusal = format!("{flag}: a flag of cAdvisor, which kubelet 1.37 has removed");
            assert!(text.contains(&refusal), "{text}");
        }
    }

    #[test]
    fn an_unsupported_flag_is_checked_and_reported_and_has_no_effect() {
        let loaded = line(&["--contention-profiling", "--volume-plugin-dir", "/v"]).unwrap();
        assert_eq!(loaded.config.fixed_gates(), None);
        // A flag without an effect is reported by each service that is given it.
        let ignored: Vec<String> =
            loaded.config.ignored(Service::PodSync).into_iter().map(|(f, _)| f).collect();
        assert_eq!(ignored, ["volumePluginDir: /v", "enableContentionProfiling: true"]);
        assert!(line(&["--lock-file="]).is_ok(), "an empty value has no effect");
        let Err(Exit::Invalid(diagnostics)) = line(&["--contention-profiling=perhaps", "--lock-file", "/l"])
        else {
            panic!("a wrong value and a refused flag")
        };
        let text = crate::diagnostics::render(&diagnostics);
        assert!(text.contains("--lock-file: pod-sync holds a lock on the root directory"), "{text}");
        let Err(Exit::Invalid(diagnostics)) = line(&["--contention-profiling=perhaps"]) else {
            panic!("a wrong value")
        };
        assert!(
            crate::diagnostics::render(&diagnostics).contains("must be true or false"),
            "{diagnostics:?}"
        );
        assert!(matches!(line(&["--no-flag-of-anybody"]), Err(Exit::Clap(_))));
        let Err(Exit::Clap(help)) = line(&["--help"]) else { panic!("help") };
        assert!(!help.to_string().contains("contention-profiling"), "{help}");
    }
}
