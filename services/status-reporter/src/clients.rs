//! Clients of the API server from a kubeconfig that may appear late and change.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use kube::config::{KubeConfigOptions, Kubeconfig};
use quintlet_kit::task::blocking;
use quintlet_kit::timers::FileChecks;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

/// Waits between checks of the files: until they are usable, and the longest after that.
const LOOK_FOR_EVERY: Duration = Duration::from_millis(500);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// Longest wait for the first attempt to load the kubeconfig.
const FIRST: Duration = Duration::from_secs(1);

const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// Purposes of clients. Each has its own connections, so that no purpose waits for another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    /// Pod statuses and mirror pods.
    Pods,
    /// The Node object.
    Node,
    /// The node's Lease, whose renewal must not wait behind other writes.
    Lease,
    /// Events of pods and of the node.
    Events,
    /// CSINode.
    Storage,
}

/// The clients of all purposes.
pub struct Clients([kube::Client; 5]);

impl Clients {
    /// Returns the client with the connections of a purpose.
    #[must_use]
    pub fn of(&self, purpose: Purpose) -> kube::Client {
        let [pods, node, lease, events, storage] = &self.0;
        match purpose {
            Purpose::Pods => pods,
            Purpose::Node => node,
            Purpose::Lease => lease,
            Purpose::Events => events,
            Purpose::Storage => storage,
        }
        .clone()
    }

    // Blocks: the caller is on a blocking thread.
    async fn load(path: &Path) -> Result<Self, kube::Error> {
        let kubeconfig = Kubeconfig::read_from(path).map_err(kube::Error::InferKubeconfig)?;
        let options = KubeConfigOptions::default();
        let mut config = kube::Config::from_custom_kubeconfig(kubeconfig, &options)
            .await
            .map_err(kube::Error::InferKubeconfig)?;
        // The roots of the system, which no connection would use, take 0.1 MiB per client.
        if config.cluster_url.scheme_str() == Some("http") {
            config.root_cert = Some(Vec::new());
        }
        config.connect_timeout = Some(CONNECT_WITHIN);
        // This crate retries by itself, since a newer status may replace an older one.
        config.default_retry = false;
        let client = || kube::Client::try_from(config.clone());
        Ok(Self([client()?, client()?, client()?, client()?, client()?]))
    }
}

/// The newest clients, or none while the kubeconfig is unusable.
pub type Current = watch::Receiver<Option<Arc<Clients>>>;

/// Spawns the task that loads the kubeconfig, and reloads it when the file or a file that it names changes.
/// Returns after the first attempt, so that the first request has a client. A disk that does not answer
/// delays that by a second at most.
pub async fn follow(path: PathBuf, stop: CancellationToken) -> Current {
    let (sender, receiver) = watch::channel(None);
    let (looked, first) = oneshot::channel();
    quintlet_kit::task::spawn("kubeconfig", async move {
        // A dropped check loses nothing.
        tokio::select! {
            () = look(path, sender, looked) => {}
            () = stop.cancelled() => {}
        }
    });
    // It is tried again in any case.
    let _attempted = tokio::time::timeout(FIRST, first).await;
    receiver
}

type Fingerprint = Vec<(PathBuf, Option<(SystemTime, u64)>)>;

async fn look(path: PathBuf, current: watch::Sender<Option<Arc<Clients>>>, looked: oneshot::Sender<()>) {
    let mut known = None::<Fingerprint>;
    let mut looked = Some(looked);
    // Whether the file was missing at the last failure.
    let mut complained = None::<bool>;
    let mut checks = FileChecks::new(LONGEST_WAIT);
    loop {
        let (file, before) = (path.clone(), known.clone());
        let runtime = tokio::runtime::Handle::current();
        // The client library reads the files as it loads the configuration.
        let read = move || {
            let seen = fingerprint(&file, before.as_ref());
            let loaded = (before.as_ref() != Some(&seen)).then(|| runtime.block_on(Clients::load(&file)));
            (seen, loaded)
        };
        let (seen, loaded) = blocking(read).await;
        if let Some(loaded) = loaded {
            match loaded {
                Ok(clients) => {
                    info!(path = %path.display(), "loaded kubeconfig");
                    current.send_replace(Some(Arc::new(clients)));
                    (known, complained) = (Some(seen), None);
                    checks.reset();
                }
                Err(error) => {
                    let is_missing = seen.first().is_some_and(|(_, file)| file.is_none());
                    match (is_missing, complained.replace(is_missing) != Some(is_missing)) {
                        // pod-sync writes the file after a bootstrap.
                        (true, true) => info!(path = %path.display(), "waiting for the kubeconfig"),
                        (false, true) => {
                            let why = quintlet_kit::error_chain(&error);
                            warn!(path = %path.display(), %why, "load kubeconfig failed, retrying");
                        }
                        (_, false) => {}
                    }
                }
            }
        }
        if let Some(looked) = looked.take() {
            let _ = looked.send(());
        }
        quintlet_kit::timers::pause(if known.is_some() { checks.wait() } else { LOOK_FOR_EVERY }).await;
    }
}

/// Times and sizes of the kubeconfig and the files that it names.
/// `known` is the last result: a kubeconfig that has not changed since names the same files.
fn fingerprint(path: &Path, known: Option<&Fingerprint>) -> Fingerprint {
    let look = |file: PathBuf| {
        let seen = std::fs::metadata(&file).ok().and_then(|m| Some((m.modified().ok()?, m.len())));
        (file, seen)
    };
    let own = look(path.to_owned());
    if let Some(known) = known.filter(|known| own.1.is_some() && known.first() == Some(&own)) {
        return known.iter().map(|(file, _)| look(file.clone())).collect();
    }
    let mut files = Vec::new();
    if let Ok(config) = Kubeconfig::read_from(path) {
        files.extend(
            config
                .clusters
                .iter()
                .filter_map(|c| c.cluster.as_ref()?.certificate_authority.clone())
                .map(PathBuf::from),
        );
        for user in config.auth_infos.iter().filter_map(|u| u.auth_info.as_ref()) {
            files.extend(user.client_certificate.iter().chain(&user.client_key).map(PathBuf::from));
        }
    }
    std::iter::once(own).chain(files.into_iter().map(look)).collect()
}
