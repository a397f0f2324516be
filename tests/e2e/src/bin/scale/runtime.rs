//! Runs the fake runtime in its own process, so that its usage is not counted for the services.

use std::collections::HashMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use quintlet_cri_api::v1::runtime_service_client::RuntimeServiceClient;
use quintlet_cri_api::v1::{ContainerState, ContainerStatusRequest};
use quintlet_testkit::fake_runtime::{ContainerSeed, FakeRuntime, Options};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tonic::transport::Channel;

use crate::{Args, Exit, now};

/// Delay of the CRI state after the exit event, as with containerd.
pub(crate) const EXIT_LAG: Duration = Duration::from_millis(5);
/// Smallest and largest size of the annotations of a container or sandbox, in bytes. A runtime without list
/// streams cannot list as many containers with larger ones, since its response is limited to 16 MiB.
const STREAMED_NOTES: (usize, usize) = (700, 3_300);
const LISTED_NOTES: (usize, usize) = (0, 0);
/// Images of the containers of a pod, by number.
const IMAGES: [&str; 3] =
    ["registry.k8s.io/web:1.27.4", "registry.k8s.io/proxy:v1.31.2", "registry.k8s.io/logs:3.1"];

#[derive(Debug, Clone)]
pub(crate) struct FakeArgs {
    pods: usize,
    containers: usize,
    /// Whether the runtime has list streams.
    streams: bool,
}

impl FakeArgs {
    pub(crate) fn of(args: &Args) -> anyhow::Result<Self> {
        let streams = match args.runtimes.as_slice() {
            [kind] if kind == "streams" => true,
            [kind] if kind == "lists" => false,
            other => anyhow::bail!("{other:?} is not one of the runtimes streams and lists"),
        };
        Ok(Self { pods: args.pods, containers: args.containers, streams })
    }

    fn notes(&self, n: usize) -> Option<(String, String)> {
        let (least, most) = if self.streams { STREAMED_NOTES } else { LISTED_NOTES };
        // Neighbours have different sizes.
        let bytes = least + (n * 7_919) % (most - least).max(1);
        (bytes > 0)
            .then(|| ("kubectl.kubernetes.io/last-applied-configuration".to_owned(), "x".repeat(bytes)))
    }
}

fn pairs<const N: usize>(pairs: [(&str, String); N]) -> HashMap<String, String> {
    pairs.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
}

fn fill(runtime: &FakeRuntime, args: &FakeArgs) -> Vec<String> {
    let mut ids = Vec::new();
    for p in 0..args.pods {
        let uid = format!("{p:08x}-5c1e-4f0a-9b7d-{:012x}", p * 7_919);
        let name = format!("web-{:08x}-{p:05}", p / 50);
        let sandbox = runtime.add_sandbox(&uid, &name, &format!("team-{}", p % 40), 0);
        runtime.edit_sandbox(&sandbox, |s| {
            s.labels.extend(pairs([
                ("app.kubernetes.io/name", format!("web-{}", p / 50)),
                ("app.kubernetes.io/part-of", "shop".to_owned()),
                ("pod-template-hash", format!("{:08x}", p / 50)),
            ]));
            s.annotations.extend(pairs([
                ("kubernetes.io/config.seen", "2026-11-21T09:12:27.123456789Z".to_owned()),
                ("kubernetes.io/config.source", "api".to_owned()),
            ]));
            s.annotations.extend(args.notes(p));
        });
        for c in 0..args.containers {
            let mut seed = ContainerSeed::running(["web", "proxy", "logs"][c % 3]);
            seed.attempt = u32::try_from(c / 3).unwrap_or_default();
            seed.image = IMAGES[c % 3].to_owned();
            seed.annotations = pairs([
                ("io.kubernetes.container.hash", format!("{:08x}", p * 31 + c)),
                ("io.kubernetes.container.restartCount", "0".to_owned()),
                ("io.kubernetes.container.terminationMessagePath", "/dev/termination-log".to_owned()),
                ("io.kubernetes.container.terminationMessagePolicy", "File".to_owned()),
                ("io.kubernetes.pod.terminationGracePeriod", "30".to_owned()),
            ]);
            seed.annotations.extend(args.notes(p * args.containers + c));
            ids.push(runtime.add_container(&sandbox, &seed));
        }
    }
    ids
}

/// Runs the runtime until standard input ends. Each line has the number of a container, which then exits. The
/// response is its ID and the time.
pub(crate) async fn serve(socket: &Path, args: &FakeArgs) -> anyhow::Result<()> {
    let runtime = FakeRuntime::stopped(socket, Options { exit_lag: EXIT_LAG, ..Options::default() });
    let ids = fill(&runtime, args);
    runtime.stream_lists(args.streams);
    runtime.up()?;
    let mut out = tokio::io::stdout();
    out.write_all(b"ready\n").await?;
    let mut lines = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = lines.next_line().await? {
        // Containers of one pod are far apart.
        let n: usize = line.trim().parse()?;
        let id = &ids[(n * 7_919) % ids.len()];
        let at = now();
        anyhow::ensure!(runtime.exit(id, 3), "container {n} has exited before");
        out.write_all(format!("{id} {at}\n").as_bytes()).await?;
    }
    Ok(())
}

/// Polls until the runtime reports that the container has exited. Returns the delay since its exit, in
/// nanoseconds.
pub(crate) async fn says_exited(
    mut client: RuntimeServiceClient<Channel>,
    (id, at): Exit,
) -> anyhow::Result<u64> {
    let deadline = at + u64::try_from(crate::LIMIT.as_nanos())?;
    while now() < deadline {
        let request = ContainerStatusRequest { container_id: id.clone(), verbose: false };
        let status = client.container_status(request).await?.into_inner().status.context("a status")?;
        if status.state() == ContainerState::ContainerExited {
            return Ok(now().saturating_sub(at));
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    anyhow::bail!("the runtime never says that {id} has exited")
}

/// The client side of that process.
pub(crate) struct Fake {
    _process: Child,
    to: ChildStdin,
    from: Lines<BufReader<ChildStdout>>,
}

impl Fake {
    pub(crate) async fn start(socket: &Path, args: &FakeArgs) -> anyhow::Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .arg("--serve")
            .arg(socket)
            .args(["--pods", &args.pods.to_string(), "--containers", &args.containers.to_string()])
            .args(["--runtimes", if args.streams { "streams" } else { "lists" }])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        let input = process.stdin.take().context("its standard input")?;
        let output = BufReader::new(process.stdout.take().context("its standard output")?).lines();
        let mut fake = Self { _process: process, to: input, from: output };
        let first = fake.line().await?;
        anyhow::ensure!(first == "ready", "the runtime says {first:?}");
        Ok(fake)
    }

    async fn line(&mut self) -> anyhow::Result<String> {
        self.from.next_line().await?.context("the runtime has ended")
    }

    /// Makes a container exit.
    pub(crate) async fn exit(&mut self, n: usize) -> anyhow::Result<Exit> {
        self.to.write_all(format!("{n}\n").as_bytes()).await?;
        let line = self.line().await?;
        let (id, at) = line.split_once(' ').context("an id and a time")?;
        Ok((id.to_owned(), at.parse()?))
    }
}
