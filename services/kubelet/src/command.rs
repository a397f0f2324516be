//! Translates the command line of a kubelet. Reads the configuration files, and does no other I/O.
//!
//! A flag for a field that `quintctl up` has an option for becomes that option. Any other flag goes to the
//! services that honour it, or to the service that warns that it has no effect. The verdicts are those of the
//! table in `quintlet-config`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, ArgMatches, Args as _, Command};
use quintctl::up::{ServiceArgument, UpArgs};
use quintlet_config::Exit;
use quintlet_config::diagnostics::Diagnostic;
use quintlet_config::kind::Kind;
use quintlet_config::node::{Data, LocatedValue, Origin};
use quintlet_config::table::{Document, FLAGS, FieldSupport, FlagRow, FlagSupport, Row, Service};
use quintlet_config::{Config, Sources};

use crate::files::{ConfigPlaces, NodeFiles};

/// Directory of the node's state if no flag and no file sets it.
const ROOT_DIR: &str = "/var/lib/kubelet";

/// Endpoint of the runtime if no flag and no file sets it.
const RUNTIME_ENDPOINT: &str = "unix:///run/containerd/containerd.sock";

/// Options of `quintctl up` that a kubelet does not have.
const OWN: [(&str, &str); 2] = [
    ("log-dir", "Directory of the services' logs [default: /var/log/quintlet]"),
    ("bin-dir", "Directory of the services' programs [default: that of this program]"),
];

/// Option of this program that checks and starts nothing.
const CHECK: &str = "check";

/// Flags of the kubelet without a field, and the service that has the same flag.
const FORWARDED: [(&str, Service); 7] = [
    ("cloud-provider", Service::StatusReporter),
    ("housekeeping-interval", Service::NodeApi),
    ("image-credential-provider-bin-dir", Service::PodSync),
    ("image-credential-provider-config", Service::PodSync),
    ("max-housekeeping-interval", Service::NodeApi),
    ("maximum-dead-containers-per-container", Service::PodSync),
    ("minimum-container-ttl-duration", Service::PodSync),
];

/// The field that a flag sets although it has no flag in the table.
const VERBOSITY: (&str, &str) = ("v", "logging.verbosity");

/// The work that a command line asks for.
pub(super) enum KubeletRequest {
    /// Print the version of Kubernetes.
    Version,
    /// Check the files and the configuration, and print the settings.
    Check(Box<KubeletCommand>),
    /// Run the services until a signal, with this command line.
    Run(Box<KubeletCommand>),
}

/// A parsed command line.
pub(super) struct KubeletCommand {
    config: Option<PathBuf>,
    config_dir: Option<PathBuf>,
    bootstrap: Option<PathBuf>,
    /// Fields that flags set, in the order of the table.
    fields: Vec<(Document, &'static Row, LocatedValue)>,
    /// Options that `up` has under the same name.
    own: Vec<OsString>,
    /// Flags without a field.
    forwarded: Vec<ServiceArgument>,
}

/// Parses a command line; its first word is the program.
pub(super) fn read(line: Vec<OsString>) -> Result<KubeletRequest, Exit> {
    let given = command().try_get_matches_from(line).map_err(Exit::Clap)?;
    if given.get_one::<String>("version").is_some_and(|value| value != "false") {
        return Ok(KubeletRequest::Version);
    }
    let refused: Vec<Diagnostic> = FLAGS.iter().filter_map(|row| refusal(row, &given)).collect();
    if !refused.is_empty() {
        return Err(Exit::Invalid(refused));
    }
    let path = |id: &str| values(&given, id).last().map(PathBuf::from);
    let own = OWN.iter().flat_map(|(name, _)| values(&given, name).into_iter().map(move |v| flag(name, &v)));
    let forwarded = FORWARDED.iter().flat_map(|(name, service)| {
        // As in the kubelet, the last one counts.
        let value = values(&given, name).into_iter().next_back().filter(|value| !value.is_empty());
        value.map(|value| ServiceArgument { service: *service, argument: flag(name, &value) })
    });
    let line = Box::new(KubeletCommand {
        config: path("config"),
        config_dir: path("config-dir"),
        bootstrap: path("bootstrap-kubeconfig").filter(|path| path != Path::new("")),
        fields: fields(&given),
        own: own.collect(),
        forwarded: forwarded.collect(),
    });
    Ok(if given.get_flag(CHECK) { KubeletRequest::Check(line) } else { KubeletRequest::Run(line) })
}

fn command() -> Command {
    let about =
        "Quintlet in the place of a kubelet: the command line of the kubelet starts the five services";
    let mut command = Command::new("kubelet")
        .about(about)
        .after_help("Each flag of the kubelet and its effect: docs/migration.md. Exit codes: 64 usage or invalid file, 69 missing file.")
        .disable_version_flag(true)
        .arg(
            Arg::new("version")
                .long("version")
                .help("Print the version of Kubernetes whose kubelet this is")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("true")
                .value_parser(["true", "false", "raw"]),
        )
        .arg(
            Arg::new(CHECK)
                .long(CHECK)
                .action(ArgAction::SetTrue)
                .help("Check the files and the configuration, print the settings as JSON, and start nothing"),
        )
        .arg(argument("config", false).help("Configuration file of the kubelet and of Quintlet"))
        .arg(argument("config-dir", false).help("Directory of drop-in files *.conf"));
    for (name, help) in OWN {
        command = command.arg(argument(name, false).help(help));
    }
    for (name, row) in field_flags() {
        command = command.arg(argument(name, matches!(row.kind, Kind::Bool)).hide(true));
    }
    for row in FLAGS {
        let known = command.get_arguments().any(|arg| arg.get_long() == Some(row.name));
        if !known && row.name != "help" {
            let arg = argument(row.name, row.is_switch).hide(true);
            command = command.arg(if row.name == VERBOSITY.0 { arg.short('v') } else { arg });
        }
    }
    command
}

fn argument(name: &'static str, is_switch: bool) -> Arg {
    let arg = Arg::new(name).long(name).action(ArgAction::Append);
    if is_switch {
        arg.num_args(0..=1).require_equals(true).default_missing_value("true")
    } else {
        arg.num_args(1).allow_hyphen_values(true)
    }
}

/// Returns the fields with a flag: the kubelet's or, where it has none, that of Quintlet. A flag of several
/// fields is left out.
fn field_flags() -> Vec<(&'static str, &'static Row)> {
    let rows = || Document::ALL.into_iter().flat_map(Document::rows);
    rows()
        .filter_map(|row| Some((field_flag(row)?, row)))
        .filter(|(found, _)| rows().filter(|row| field_flag(row) == Some(*found)).count() == 1)
        .collect()
}

fn field_flag(row: &Row) -> Option<&'static str> {
    row.kubelet_flag.or(row.own_flag)
}

fn values(given: &ArgMatches, id: &str) -> Vec<String> {
    let raw = given.get_raw(id).into_iter().flatten();
    raw.map(|value| value.to_string_lossy().into_owned()).collect()
}

fn flag(name: &str, value: &str) -> OsString {
    OsString::from(format!("--{name}={value}"))
}

fn refusal(row: &FlagRow, given: &ArgMatches) -> Option<Diagnostic> {
    let FlagSupport::Refused(why) = row.support else { return None };
    let name = format!("--{}", row.name);
    let is_given = values(given, row.name).iter().any(|value| !value.is_empty());
    is_given.then(|| Diagnostic::error(Origin::Flag(name.as_str().into()), name, why))
}

fn fields(given: &ArgMatches) -> Vec<(Document, &'static Row, LocatedValue)> {
    let flags = field_flags();
    let mut fields = Vec::new();
    for document in Document::ALL {
        for row in document.rows() {
            // By the name, which only one row has: a constant has another address in each crate that it is
            // inlined into.
            let name = field_flag(row).filter(|name| flags.iter().any(|(flag, _)| flag == name));
            let Some(name) = name else { continue };
            let raw = values(given, name);
            if !raw.is_empty() {
                fields.push((document, row, row.kind.from_flag(&raw, &format!("--{name}"))));
            }
        }
    }
    let verbosity = values(given, VERBOSITY.0);
    if let Some(row) = Document::Kubelet.row(VERBOSITY.1).filter(|_| !verbosity.is_empty()) {
        fields.push((Document::Kubelet, row, row.kind.from_flag(&verbosity, "-v")));
    }
    fields
}

impl KubeletCommand {
    /// Returns the files that are checked before the configuration is read.
    pub(super) fn places(&self) -> ConfigPlaces {
        let root = self.fields.iter().find(|(_, row, _)| row.field == "rootDir");
        let root = root.and_then(|(_, _, value)| value.text()).unwrap_or(ROOT_DIR);
        ConfigPlaces { config: self.config.clone(), root_dir: PathBuf::from(root) }
    }

    /// Loads the configuration with the flags.
    pub(super) fn load(&self) -> Result<KubeletSettings, Exit> {
        let sources = Sources {
            file: self.config.clone(),
            drop_ins: self.config_dir.clone(),
            flags: self.fields.clone(),
            strict: false,
            service: None,
        };
        let config = Config::load(&sources).map_err(Exit::Invalid)?;
        let routes = Routes::new(&self.fields, &self.forwarded);
        Ok(KubeletSettings { config, routes, bootstrap: self.bootstrap.clone() })
    }
}

/// The settings of a node that another agent on the same machine may have as well. `quintctl install` reads
/// them.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct SharedSettings {
    root_dir: PathBuf,
    node_name: String,
    run_dir: PathBuf,
    pub(super) runtime_endpoint: String,
    /// The configured driver; none for the default.
    cgroup_driver: Option<String>,
    /// The driver that the runtime reports.
    pub(super) runtime_cgroup_driver: Option<String>,
    /// The error of the runtime.
    pub(super) runtime_error: Option<String>,
    /// Ports by the name of their field, without those that are off.
    ports: BTreeMap<String, u16>,
}

/// The receivers of the given flags.
struct Routes {
    up: Vec<OsString>,
    services: Vec<ServiceArgument>,
    certificates: Option<PathBuf>,
}

impl Routes {
    fn new(fields: &[(Document, &'static Row, LocatedValue)], forwarded: &[ServiceArgument]) -> Self {
        let up = UpArgs::augment_args(Command::new("up"));
        let has = |name: &str| up.get_arguments().any(|arg| arg.get_long() == Some(name));
        let mut routes = Self { up: Vec::new(), services: forwarded.to_vec(), certificates: None };
        for (_, row, value) in fields {
            // Certificates that pod-sync requests. The self-signed one of node-api is in a directory of its
            // own.
            if row.field == "certDir" {
                routes.certificates = value.text().map(PathBuf::from);
                continue;
            }
            let (name, receivers): (_, &[Service]) = match &row.support {
                FieldSupport::Honoured { services, .. } => (row.flag(), services),
                FieldSupport::Ignored { owner, .. } => (row.kubelet_flag, std::slice::from_ref(owner)),
                // A value other than the default was an error.
                FieldSupport::Refused { .. } => continue,
            };
            // The verbosity has no flag: it became the filter of the log.
            let Some(name) = name else { continue };
            let mut values = row.kind.to_flag(value);
            if values.is_empty() {
                values.push(String::new());
            }
            let arguments = values.iter().map(|value| flag(name, value));
            if has(name) {
                routes.up.extend(arguments);
                continue;
            }
            for argument in arguments {
                let argument =
                    |service: &Service| ServiceArgument { service: *service, argument: argument.clone() };
                routes.services.extend(receivers.iter().map(argument));
            }
        }
        routes
    }
}

/// The effective configuration, and where its flags go.
pub(super) struct KubeletSettings {
    config: Config,
    routes: Routes,
    bootstrap: Option<PathBuf>,
}

impl KubeletSettings {
    fn path(&self, document: Document, field: &str) -> Option<PathBuf> {
        let text = self.config.value(document, field)?.text().filter(|text| !text.is_empty());
        text.map(PathBuf::from)
    }

    /// Returns the files of the node.
    pub(super) fn files(&self, places: &ConfigPlaces) -> NodeFiles {
        NodeFiles {
            root_dir: self.path(Document::Quintlet, "rootDir").unwrap_or_else(|| places.root_dir.clone()),
            kubeconfig: self.path(Document::Quintlet, "kubeconfig"),
            bootstrap: self.bootstrap.clone(),
            client_ca: self.path(Document::Kubelet, "authentication.x509.clientCAFile"),
            manifests: self.path(Document::Kubelet, "staticPodPath"),
        }
    }

    /// Returns the settings that another agent on this machine may have as well.
    pub(super) fn shared(&self, places: &ConfigPlaces) -> SharedSettings {
        let text = |document: Document, field: &str| {
            let value = self.config.value(document, field).and_then(LocatedValue::text);
            value.filter(|text| !text.is_empty()).map(str::to_owned)
        };
        let port = |field: &str| match self.config.value(Document::Kubelet, field).map(|value| &value.data) {
            Some(Data::Int(port)) => u16::try_from(*port).ok().filter(|port| *port != 0),
            _ => None,
        };
        let named = ["port", "healthzPort", "readOnlyPort"];
        let ports = named.iter().filter_map(|field| Some(((*field).to_owned(), port(field)?)));
        let driver = self.config.value(Document::Kubelet, "cgroupDriver");
        SharedSettings {
            root_dir: self.files(places).root_dir,
            node_name: text(Document::Quintlet, "nodeName").unwrap_or_else(quintlet_kit::args::host_name),
            run_dir: self.path(Document::Quintlet, "runDir").unwrap_or_default(),
            runtime_endpoint: text(Document::Kubelet, "containerRuntimeEndpoint")
                .unwrap_or_else(|| RUNTIME_ENDPOINT.to_owned()),
            cgroup_driver: driver
                .filter(|value| value.origin.is_set())
                .and_then(LocatedValue::text)
                .map(str::to_owned),
            runtime_cgroup_driver: None,
            runtime_error: None,
            ports: ports.collect(),
        }
    }

    /// Returns the warnings about flags.
    pub(super) fn warnings(&self) -> Vec<Diagnostic> {
        let warnings = self.config.warnings.iter();
        warnings.filter(|warning| matches!(warning.origin, Origin::Flag(_))).cloned().collect()
    }

    /// Returns the command line of `quintctl up`.
    pub(super) fn up_line(&self, line: &KubeletCommand) -> Vec<OsString> {
        let mut words = vec![OsString::from("quintctl"), OsString::from("up")];
        let mut option = |name: &str, value: Option<&Path>| {
            if let Some(value) = value {
                words.extend([OsString::from(format!("--{name}")), value.into()]);
            }
        };
        option("config", line.config.as_deref());
        option("config-dir", line.config_dir.as_deref());
        option("bootstrap-kubeconfig", self.bootstrap.as_deref());
        words.extend(line.own.iter().chain(&self.routes.up).cloned());
        let filter = self.config.value(Document::Quintlet, "logFilter");
        let is_given = self.routes.up.iter().any(|word| word.to_string_lossy().starts_with("--log-level="));
        if let Some(Data::Text(filter)) = filter.map(|value| &value.data).filter(|_| !is_given) {
            words.push(flag("log-level", filter));
        }
        let endpoint = self.config.value(Document::Kubelet, "containerRuntimeEndpoint");
        if endpoint.is_none_or(|value| value.origin == Origin::Default) {
            words.push(flag("runtime-endpoint", RUNTIME_ENDPOINT));
        }
        words
    }

    /// Returns the arguments of services.
    pub(super) fn extra(&self) -> Vec<ServiceArgument> {
        self.routes.services.clone()
    }

    /// Returns the directory of the certificates that pod-sync requests, if a flag sets it.
    pub(super) fn certificates(&self) -> Option<PathBuf> {
        self.routes.certificates.clone()
    }
}

#[cfg(test)]
mod tests;
