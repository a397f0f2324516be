//! Checks the files of a node of kubeadm before the services start. Only reads.
//!
//! A kubelet that finds such a file missing or broken exits with a chain of errors, or starts and fails
//! later. Here each problem is one line with the path, the cause and the remedy, and nothing on the node has
//! changed.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::authority::{Certificates, NoCertificate};
use super::kubeconfig::{self, KubeconfigFacts, KubeconfigProblem, Material};

/// Variable in the file of flags.
pub(super) const FLAGS_VARIABLE: &str = "KUBELET_KUBEADM_ARGS";

/// File with flags of this node, beside the configuration.
const FLAGS_FILE: &str = "kubeadm-flags.env";

/// File with the fields of the configuration that are this node's own.
const INSTANCE_FILE: &str = "instance-config.yaml";

/// Manifests of a control plane.
const MANIFESTS: [&str; 4] =
    ["etcd.yaml", "kube-apiserver.yaml", "kube-controller-manager.yaml", "kube-scheduler.yaml"];

const CONFIGURATION_REMEDY: &str = "run kubeadm join, or kubeadm init on the first node; on a node of the cluster, \
                                    kubeadm upgrade node phase kubelet-config writes it again";
const FLAGS_REMEDY: &str =
    "kubeadm join writes it; a node without flags has the line KUBELET_KUBEADM_ARGS=\"\"";
const JOIN_REMEDY: &str = "run kubeadm join, or kubeadm init on the first node";
const REJOIN_REMEDY: &str = "run kubeadm reset and kubeadm join";
const RESTORE_REMEDY: &str = "copy it from a control plane node, or run kubeadm reset and kubeadm join";
const MANIFEST_REMEDY: &str = "kubeadm upgrade node phase control-plane writes it again";

/// The files that are read first.
#[derive(Debug, Clone)]
pub(super) struct ConfigPlaces {
    pub(super) config: Option<PathBuf>,
    pub(super) root_dir: PathBuf,
}

/// The files that the command line and the configuration name.
#[derive(Debug, Clone)]
pub(super) struct NodeFiles {
    pub(super) root_dir: PathBuf,
    pub(super) kubeconfig: Option<PathBuf>,
    pub(super) bootstrap: Option<PathBuf>,
    pub(super) client_ca: Option<PathBuf>,
    pub(super) manifests: Option<PathBuf>,
}

/// A file that prevents the start.
#[derive(Debug)]
pub(super) struct FileProblem {
    path: PathBuf,
    cause: FileCause,
    remedy: &'static str,
}

#[derive(Debug, thiserror::Error)]
enum FileCause {
    #[error("does not exist")]
    Missing,
    #[error("is empty")]
    Empty,
    #[error("cannot be read: {0}")]
    Unreadable(io::Error),
    #[error("belongs to the user with ID {0}, not to root")]
    Owner(u32),
    #[error("{0}")]
    Kubeconfig(KubeconfigProblem),
    #[error("{0}")]
    Certificate(NoCertificate),
    #[error("does not set {FLAGS_VARIABLE}")]
    NoFlags,
    #[error("is not valid YAML with fields of a KubeletConfiguration")]
    NotFields,
    #[error("is of another cluster: {0}")]
    OtherCluster(String),
}

impl FileProblem {
    /// Returns whether the file is there and has to be changed.
    pub(super) fn is_invalid(&self) -> bool {
        match self.cause {
            FileCause::Missing | FileCause::Unreadable(_) => false,
            FileCause::Empty
            | FileCause::Owner(_)
            | FileCause::Kubeconfig(_)
            | FileCause::Certificate(_)
            | FileCause::NoFlags
            | FileCause::NotFields
            | FileCause::OtherCluster(_) => true,
        }
    }
}

impl fmt::Display for FileProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, cause) = (self.path.display(), &self.cause);
        match cause {
            FileCause::Owner(_) => write!(f, "{path} {cause}: check its content, then run chown root {path}"),
            FileCause::Unreadable(_) => write!(f, "{path} {cause}: it must be a file that root can read"),
            _ => write!(f, "{path} {cause}: {}", self.remedy),
        }
    }
}

/// Checks the configuration file. `by_kubeadm`: the file must be one of kubeadm.
pub(super) fn check_config(places: &ConfigPlaces, by_kubeadm: bool) -> Result<(), FileProblem> {
    let Some(path) = &places.config else { return Ok(()) };
    let remedy = if by_kubeadm || path.starts_with(&places.root_dir) {
        CONFIGURATION_REMEDY
    } else {
        "create it, or change --config"
    };
    required(path, remedy).map(drop)
}

/// Returns the problems of the other files. `has_flags`: the flags of the node are in the environment.
///
/// A node of kubeadm has its flags in the environment, and the authority of its API server is that of its
/// clients. A node that was set up by hand need not.
pub(super) fn check(files: &NodeFiles, by_kubeadm: bool, has_flags: bool) -> Vec<FileProblem> {
    let mut problems = Vec::new();
    let mut keep = |result: Result<(), FileProblem>| problems.extend(result.err());
    keep(check_flags(&files.root_dir.join(FLAGS_FILE), by_kubeadm && !has_flags));
    keep(check_instance(&files.root_dir.join(INSTANCE_FILE)));
    let client_ca = files.client_ca.as_deref().map(|path| certificates(path, RESTORE_REMEDY));
    let authority = match client_ca {
        Some(Ok(authority)) => Some(authority),
        Some(Err(problem)) => {
            keep(Err(problem));
            None
        }
        None => None,
    };
    keep(check_kubeconfigs(files, authority.as_ref().filter(|_| by_kubeadm)));
    if let Some(dir) = &files.manifests {
        keep(owner(dir).map(drop));
        for name in MANIFESTS {
            keep(optional(&dir.join(name), MANIFEST_REMEDY).map(drop));
        }
    }
    problems
}

fn check_flags(path: &Path, is_required: bool) -> Result<(), FileProblem> {
    let text = if is_required { Some(required(path, FLAGS_REMEDY)?) } else { optional(path, FLAGS_REMEDY)? };
    let sets = |text: &str| {
        text.lines().any(|line| line.trim().split_once('=').is_some_and(|(name, _)| name == FLAGS_VARIABLE))
    };
    match text {
        Some(text) if !sets(&text) => Err(problem(path, FileCause::NoFlags, FLAGS_REMEDY)),
        Some(_) | None => Ok(()),
    }
}

/// Checks a file that kubeadm alone reads, at the next upgrade of the node.
fn check_instance(path: &Path) -> Result<(), FileProblem> {
    let remedy = "kubeadm upgrade reads it; kubeadm join writes it with the field containerRuntimeEndpoint";
    let Some(text) = optional(path, remedy)? else { return Ok(()) };
    let fields: Result<serde_json::Map<String, serde_json::Value>, _> = serde_saphyr::from_str(&text);
    fields.map(drop).map_err(|_| problem(path, FileCause::NotFields, remedy))
}

fn check_kubeconfigs(files: &NodeFiles, client_ca: Option<&Certificates>) -> Result<(), FileProblem> {
    let Some(path) = &files.kubeconfig else { return Ok(()) };
    let bootstrap = files.bootstrap.as_deref();
    let Some(text) = optional(path, REJOIN_REMEDY)? else {
        // A bootstrap writes the file.
        let Some(bootstrap) = bootstrap else { return Err(problem(path, FileCause::Missing, JOIN_REMEDY)) };
        let Some(text) = optional(bootstrap, JOIN_REMEDY)? else {
            return Err(problem(
                path,
                FileCause::Missing,
                "it has no bootstrap kubeconfig either: run kubeadm join, or kubeadm init on the first node",
            ));
        };
        return check_cluster(bootstrap, &parsed(bootstrap, &text, JOIN_REMEDY)?, client_ca, files);
    };
    let facts = parsed(path, &text, REJOIN_REMEDY)?;
    // Without a usable certificate, the node bootstraps again if it can.
    let can_bootstrap = bootstrap.is_some_and(Path::exists);
    check_cluster(path, &facts, client_ca, files)?;
    if let Some(Material::File(key)) = &facts.key {
        match required(key, REJOIN_REMEDY) {
            Err(problem) if problem.is_invalid() || !can_bootstrap => return Err(problem),
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

/// Compares the authorities of a kubeconfig and of its certificate with that of the clients of the node.
fn check_cluster(
    path: &Path,
    facts: &KubeconfigFacts,
    client_ca: Option<&Certificates>,
    files: &NodeFiles,
) -> Result<(), FileProblem> {
    let authority = facts.authority.as_ref().map(|found| material(path, found, REJOIN_REMEDY)).transpose()?;
    let can_bootstrap = files.bootstrap.as_deref().is_some_and(Path::exists);
    let certificate = match &facts.certificate {
        None => None,
        Some(found) => match material(path, found, REJOIN_REMEDY) {
            Ok(certificate) => Some(certificate),
            Err(problem) if problem.is_invalid() || !can_bootstrap => return Err(problem),
            Err(_) => None,
        },
    };
    let Some((client_ca, ca_path)) = client_ca.zip(files.client_ca.as_deref()) else { return Ok(()) };
    let other = |path: &Path, text: &str| {
        let text = format!("{text} {}", ca_path.display());
        Err(problem(path, FileCause::OtherCluster(text), REJOIN_REMEDY))
    };
    if authority.is_some_and(|authority| !authority.overlaps(client_ca)) {
        return other(path, &format!("the authority of {} is not in", facts.server));
    }
    if certificate.is_some_and(|certificate| !certificate.is_issued_by(client_ca)) {
        let holder = match &facts.certificate {
            Some(Material::File(file)) => file.as_path(),
            Some(Material::Inline(_)) | None => path,
        };
        return other(holder, "its certificate was not issued by");
    }
    Ok(())
}

fn parsed(path: &Path, text: &str, remedy: &'static str) -> Result<KubeconfigFacts, FileProblem> {
    kubeconfig::parse(text, path).map_err(|cause| problem(path, FileCause::Kubeconfig(cause), remedy))
}

/// Returns the certificates that a kubeconfig at `path` contains or names.
fn material(path: &Path, found: &Material, remedy: &'static str) -> Result<Certificates, FileProblem> {
    match found {
        Material::Inline(bytes) => {
            Certificates::parse(bytes).map_err(|cause| problem(path, FileCause::Certificate(cause), remedy))
        }
        Material::File(file) => certificates(file, remedy),
    }
}

fn certificates(path: &Path, remedy: &'static str) -> Result<Certificates, FileProblem> {
    let text = required(path, remedy)?;
    let parsed = Certificates::parse(text.as_bytes());
    parsed.map_err(|cause| problem(path, FileCause::Certificate(cause), remedy))
}

fn required(path: &Path, remedy: &'static str) -> Result<String, FileProblem> {
    optional(path, remedy)?.ok_or_else(|| problem(path, FileCause::Missing, remedy))
}

/// Reads a file that root owns. Returns none if there is no file.
fn optional(path: &Path, remedy: &'static str) -> Result<Option<String>, FileProblem> {
    if !owner(path)? {
        return Ok(None);
    }
    let text =
        std::fs::read_to_string(path).map_err(|error| problem(path, FileCause::Unreadable(error), ""))?;
    if text.trim().is_empty() { Err(problem(path, FileCause::Empty, remedy)) } else { Ok(Some(text)) }
}

/// Checks the owner of a file: root, or the user of this process. Returns false if there is no file.
fn owner(path: &Path) -> Result<bool, FileProblem> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(problem(path, FileCause::Unreadable(error), "")),
        Ok(metadata) if [0, nix::unistd::geteuid().as_raw()].contains(&metadata.uid()) => Ok(true),
        Ok(metadata) => Err(problem(path, FileCause::Owner(metadata.uid()), "")),
    }
}

fn problem(path: &Path, cause: FileCause, remedy: &'static str) -> FileProblem {
    FileProblem { path: path.to_owned(), cause, remedy }
}
