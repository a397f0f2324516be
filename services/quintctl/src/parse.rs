//! Parses the command line. The options of `quintctl up` take their defaults from the configuration of the
//! services.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgMatches, Command, CommandFactory as _, FromArgMatches as _};
use quintlet_config::arguments::{bound, defaults, flags, values};
use quintlet_config::{Config, Exit, Sources};

use crate::cli::{Cli, Command as Verb};
use crate::up::UpArgs;

/// The subcommand whose options take their defaults from a configuration.
const UP: &str = "up";

/// Parses a command line; its first word is the program. For `up`, the values of a configuration become the
/// defaults of the options, so that `up` and the services use the same values.
///
/// # Errors
/// The command line or the configuration is invalid, or the command line asks for help.
pub(crate) fn read(line: Vec<OsString>) -> Result<Cli, Exit> {
    let command = Cli::command();
    let given = command.clone().try_get_matches_from(line.clone()).map_err(Exit::Clap)?;
    let with_files = match given.subcommand_matches(UP) {
        Some(up) => with_configuration(command, up)?,
        None => command,
    };
    let matches = with_files.try_get_matches_from(line).map_err(Exit::Clap)?;
    Cli::from_arg_matches(&matches).map_err(Exit::Clap)
}

/// Returns the options of a command line of `quintctl up`.
///
/// # Errors
/// As those of a command line: invalid options or an invalid configuration, or a request for help.
pub fn up_options(line: Vec<OsString>) -> Result<UpArgs, Exit> {
    match read(line)?.command {
        Verb::Up(args) => Ok(*args),
        other => unreachable!("the line of up is {other:?}"),
    }
}

fn with_configuration(command: Command, up: &ArgMatches) -> Result<Command, Exit> {
    let path = |id: &str| up.get_one::<PathBuf>(id).cloned();
    let (file, drop_ins) = (path("config"), path("config_dir"));
    if file.is_none() && drop_ins.is_none() {
        return Ok(command);
    }
    let Some(own) = command.find_subcommand(UP) else { return Ok(command) };
    let rows = bound(own, |services| !services.is_empty());
    let sources =
        Sources { file, drop_ins, flags: flags(&rows, up), strict: up.get_flag("strict"), service: None };
    let config = Config::load(&sources).map_err(Exit::Invalid)?;
    Ok(command.mut_subcommand(UP, |up| defaults(up, &values(&rows, &config))))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use quintlet_config::diagnostics::render;

    use super::*;

    const FILE: &str = "apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n\
                        staticPodPath: pods\ncontainerRuntimeEndpoint: unix:///r.sock\nlogging: {format: json}\n\
                        ---\napiVersion: quintlet.dev/v1alpha1\nkind: QuintletConfiguration\nrunDir: /r\nnodeName: n1\ncertDir: /c\n";

    fn up(file: &str, options: &[&str]) -> Result<crate::up::UpArgs, Exit> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        std::fs::write(&path, file).unwrap();
        let start = ["quintctl", "up", "--config", path.to_str().unwrap()];
        match read(start.into_iter().chain(options.iter().copied()).map(Into::into).collect())?.command {
            Verb::Up(args) => Ok(*args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn up_uses_the_configuration_and_options_override_it() {
        let args = up(FILE, &["--node-name", "n2"]).unwrap();
        assert!(args.manifests.as_deref().is_some_and(|m| m.ends_with("pods") && m.is_absolute()));
        assert_eq!(args.runtime_endpoint.as_deref(), Some("unix:///r.sock"));
        assert_eq!((args.log_format.as_str(), args.node_name.as_deref()), ("json", Some("n2")));
        assert_eq!(args.run_dir.as_deref(), Some(Path::new("/r")));
        assert_eq!(args.cert_dir.as_deref(), Some(Path::new("/c")));
        // --private-containerd overrides the endpoint of the file.
        assert!(up(FILE, &["--private-containerd"]).unwrap().private_containerd);
    }

    #[test]
    fn an_invalid_file_is_rejected_before_anything_starts() {
        let error = up(&FILE.replace("json", "xml"), &[]).unwrap_err();
        assert_eq!(error.code(), 64);
        assert!(
            matches!(&error, Exit::Invalid(m) if render(m).contains("line 5  logging.format")),
            "{error:?}"
        );
    }
}
