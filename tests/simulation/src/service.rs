//! Runs a service in a thread with its own runtime.

use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use clap::Parser as _;
use cri_proxy::policy::Socket;
use futures::future::LocalBoxFuture;
use pod_sync::NodeNameTaken;
use quintlet_kit::args::SubscriberArgs;
use quintlet_kit::args::paths::{CriSocket, Paths};
use quintlet_kit::clock::Clock;
use quintlet_kit::server::Server;
use quintlet_kit::socket::{PeerPolicy, bind_unix};
use quintlet_kit::{failpoint, subscribe, task};
use quintlet_testkit::logs::Lines;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::Level;

use crate::cuts::{Cuts, FileRecorder, Life};

/// Name of the simulated node.
pub const NODE: &str = "sim-node";

/// A service of the simulated node, which runs as tasks of the test process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// cri-proxy, before the runtime in memory.
    CriProxy,
    /// pleg-service.
    Pleg,
    /// probe-service.
    Probe,
    /// A second instance of probe-service, which shares the pods with the first one. Only tests of instances
    /// start it.
    SecondProbe,
    /// status-reporter, before the API server in memory.
    Status,
    /// pod-sync, which tests kill at failpoints.
    PodSync,
}

impl Service {
    /// The services of a node, in their start order.
    pub const ALL: [Self; 5] = [Self::CriProxy, Self::Pleg, Self::Probe, Self::Status, Self::PodSync];

    /// Returns the name in log lines.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CriProxy => "cri-proxy",
            Self::Pleg => "pleg-service",
            Self::Probe | Self::SecondProbe => "probe-service",
            Self::Status => "status-reporter",
            Self::PodSync => "pod-sync",
        }
    }
}

/// Paths, sockets and arguments for the services.
#[derive(Debug, Clone)]
pub(crate) struct Places {
    pub(crate) base: PathBuf,
    pub(crate) cgroup_root: String,
    pub(crate) kubeconfig: Option<PathBuf>,
    pub(crate) pod_sync_args: Vec<String>,
    // Intervals of pleg-service.
    pub(crate) pleg_periods: pleg_service::Periods,
    // Users that may subscribe.
    pub(crate) subscribers: SubscriberArgs,
    pub(crate) log: Lines,
    pub(crate) cuts: Arc<Cuts>,
    // pod-sync is killed at failpoints: no other task may run between a failpoint and the kill.
    pub(crate) exact: bool,
    pub(crate) planted: Option<&'static str>,
}

impl Places {
    pub(crate) fn paths(&self) -> Paths {
        Paths::new(&self.base.join("run"))
    }

    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        self.base.join(name)
    }

    /// Returns the root directory of the node's SELinux policy.
    pub(crate) fn selinux_root(&self) -> PathBuf {
        self.dir("selinux-root")
    }
}

pub(crate) struct Running {
    stop: CancellationToken,
    kill: CancellationToken,
    thread: JoinHandle<()>,
}

impl Running {
    pub(crate) fn start(service: Service, places: Places) -> Self {
        let (stop, kill) = (CancellationToken::new(), CancellationToken::new());
        let (stopped, killed) = (stop.clone(), kill.clone());
        let thread = std::thread::Builder::new()
            .name(format!("{service:?}"))
            .spawn(move || {
                let log = quintlet_testkit::logs::capture(service.name(), Level::INFO, &places.log);
                let _of_this_thread = tracing::dispatcher::set_default(&log);
                let life = Arc::new(Life::new(Arc::clone(&places.cuts), killed.clone()));
                let is_watched = service == Service::PodSync;
                let observer: Arc<dyn failpoint::Observer> = if is_watched {
                    Arc::clone(&life) as Arc<dyn failpoint::Observer>
                } else {
                    Arc::new(FileRecorder(Arc::clone(&places.cuts)))
                };
                let planted = places.planted;
                failpoint::plant(planted);
                failpoint::observe(Arc::clone(&observer));
                let mut builder = tokio::runtime::Builder::new_current_thread();
                if is_watched && places.exact {
                    // A kill is checked for after each step of a task.
                    builder.event_interval(1);
                }
                let runtime = builder
                    .enable_all()
                    // Blocking threads are separate threads; they log for as long as they live.
                    .on_thread_start(move || {
                        std::mem::forget(tracing::dispatcher::set_default(&log));
                        failpoint::plant(planted);
                        failpoint::observe(Arc::clone(&observer));
                    })
                    .build()
                    .expect("an executor can be made");
                let work = async {
                    // A kill at a failpoint is a kill.
                    tokio::select! {
                        biased;
                        () = killed.cancelled() => {}
                        () = run(service, places, stopped) => {}
                    }
                };
                let ran = std::panic::catch_unwind(AssertUnwindSafe(|| runtime.block_on(work)));
                let was_cut = life.is_over();
                life.end();
                // Dropping the runtime of one thread drops all its tasks. Blocking ones are not waited for.
                runtime.shutdown_background();
                life.is_gone();
                if let Err(panic) = ran
                    && !was_cut
                {
                    std::panic::resume_unwind(panic);
                }
            })
            .expect("a thread can be made");
        Self { stop, kill, thread }
    }

    /// Kills the service. Returns once it is gone.
    pub(crate) async fn kill(self) {
        self.kill.cancel();
        join(self.thread).await;
    }

    /// Stops the service like SIGTERM. Returns once it has ended.
    pub(crate) async fn stop(self) {
        self.stop.cancel();
        join(self.thread).await;
    }

    /// Kills the service without waiting.
    pub(crate) fn abandon(self) {
        self.kill.cancel();
        let _panicked_in_a_test_that_fails_anyway = self.thread.join();
    }
}

async fn join(thread: JoinHandle<()>) {
    task::blocking(move || thread.join()).await.expect("a service does not panic");
}

async fn run(service: Service, places: Places, stop: CancellationToken) {
    let work: LocalBoxFuture<'_, ()> = match service {
        Service::CriProxy => Box::pin(cri_proxy(&places, stop)),
        Service::Pleg => Box::pin(pleg(&places, stop)),
        Service::Probe => Box::pin(probe(&places, "probe-0", stop)),
        Service::SecondProbe => Box::pin(probe(&places, "probe-1", stop)),
        Service::Status => Box::pin(async {
            let config = status_reporter::run::Config {
                paths: places.paths(),
                kubeconfig: places.kubeconfig.clone(),
                node_name: NODE.to_owned(),
                register_node: true,
                observers: Vec::new(),
                settings: status_reporter::run::NodeReportSettings::default(),
            };
            status_reporter::run::run(config, Clock::system(), stop).await.expect("status-reporter serves");
        }),
        Service::PodSync => Box::pin(async {
            let (_never, drain) = watch::channel(false);
            let ran = pod_sync::run(pod_sync_args(&places), drain, stop).await;
            if let Some(taken) = ran.as_ref().err().and_then(|error| error.downcast_ref::<NodeNameTaken>()) {
                // The process would log its end.
                tracing::error!(error = %taken, "service failed");
            } else {
                ran.expect("pod-sync runs");
            }
        }),
    };
    work.await;
}

async fn probe(places: &Places, id: &str, stop: CancellationToken) {
    probe_service::run(places.paths().run(), id, &[], &places.subscribers, stop)
        .await
        .expect("probe-service serves");
}

async fn cri_proxy(places: &Places, stop: CancellationToken) {
    let paths = places.paths();
    let proxy = cri_proxy::serve::Proxy::bind(cri_proxy::serve::Config {
        runtime: places.dir("runtime.sock"),
        images: None,
        timeout: cri_proxy::policy::CRI_TIMEOUT,
        namespace: "k8s.io".to_owned(),
        sockets: Socket::ALL.map(|socket| (socket, paths.cri(socket))).into(),
        uids: Vec::new(),
        pod_logs_dir: places.dir("pod-logs"),
        byte_limit: cri_proxy::budget::limit,
        connections: cri_proxy::serve::connection_limit,
        hint_capacity: cri_proxy::hints::CAPACITY,
        clock: Clock::system(),
        grant_key: paths.grant_key(),
    })
    .expect("cri-proxy binds its sockets");
    proxy.serve(stop).await;
}

async fn pleg(places: &Places, stop: CancellationToken) {
    let paths = places.paths();
    let listener = bind_unix(&paths.pleg(), 0o660).expect("pleg-service binds its socket");
    let read = paths.cri(CriSocket::Read);
    let server = Server::new("pleg-service");
    let services = pleg_service::start(
        Arc::new(pleg_service::cri::CriRuntime::new(read.clone(), places.pleg_periods.call)),
        Arc::new(pleg_service::cri::ProxyHints::new(read)),
        Clock::system(),
        places.pleg_periods,
        server.health(),
        &stop,
    );
    subscribe::serve(&paths.pleg_subscribers(), &places.subscribers, &stop, |server| {
        server.add_service(services.containers)
    });
    server
        .add_service(services.pleg)
        .serve(listener, PeerPolicy::Any, stop)
        .await
        .expect("pleg-service serves");
}

/// Returns the command line of cri-proxy, its name first.
pub(crate) fn cri_proxy_line(places: &Places) -> Vec<String> {
    let text = |path: &Path| path.display().to_string();
    let flags = [
        ("--run-dir", text(places.paths().run())),
        ("--runtime-endpoint", text(&places.dir("runtime.sock"))),
        ("--pod-logs-dir", text(&places.dir("pod-logs"))),
    ];
    let flags = flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
    std::iter::once("cri-proxy".to_owned()).chain(flags).collect()
}

fn pod_sync_args(places: &Places) -> pod_sync::args::Args {
    let mut args = pod_sync::args::Args::try_parse_from(pod_sync_line(places))
        .expect("the command line of pod-sync is right");
    // The machine that runs the tests may have SELinux.
    args.selinux_root = places.selinux_root();
    args
}

/// Returns the command line of pod-sync, including its name.
pub(crate) fn pod_sync_line(places: &Places) -> Vec<String> {
    let text = |path: &Path| path.display().to_string();
    let mut line = vec!["pod-sync".to_owned()];
    let given: Vec<&str> = places.pod_sync_args.iter().filter_map(|a| a.split('=').next()).collect();
    for (flag, value) in [
        ("--run-dir", text(places.paths().run())),
        ("--root-dir", text(&places.dir("root"))),
        ("--manifests", text(&places.dir("manifests"))),
        ("--pod-logs-dir", text(&places.dir("pod-logs"))),
        ("--container-logs-dir", String::new()),
        ("--cgroup-root", places.cgroup_root.clone()),
        ("--node-name", NODE.to_owned()),
        ("--resolv-conf", String::new()),
        ("--cluster-dns", "10.0.0.10".to_owned()),
        // The machine that runs the tests may be short of memory or disk space.
        ("--eviction-hard", "memory.available=0%".to_owned()),
    ] {
        if !given.contains(&flag) {
            line.extend([flag.to_owned(), value]);
        }
    }
    if let Some(kubeconfig) = &places.kubeconfig {
        line.extend(["--kubeconfig".to_owned(), text(kubeconfig)]);
    }
    // An argument without a value only removes the default.
    line.extend(places.pod_sync_args.iter().filter(|a| !a.ends_with('=')).cloned());
    line
}
