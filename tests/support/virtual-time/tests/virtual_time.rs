//! The clock of a process that rests, and of one that works.
#![allow(clippy::disallowed_methods, clippy::unwrap_used)]

use std::os::unix::net::UnixStream as StdStream;
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

/// Time by the machine's clock, which `Instant` does not show.
struct Machine(Duration);

impl Machine {
    fn now() -> Self {
        Self(Self::since_boot())
    }

    fn since_boot() -> Duration {
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        Duration::from_secs_f64(uptime.split(' ').next().unwrap().parse().unwrap())
    }

    fn elapsed(&self) -> Duration {
        Self::since_boot() - self.0
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

#[test]
fn an_hour_passes_at_once_while_nothing_runs() {
    quintlet_virtual_time::start();
    let machine = Machine::now();
    let (instant, wall) = (Instant::now(), SystemTime::now());
    runtime().block_on(async { sleep(Duration::from_secs(3600)).await });
    std::thread::sleep(Duration::from_secs(60));
    let passed = instant.elapsed();
    assert!(passed >= Duration::from_secs(3660) && passed < Duration::from_secs(3690), "{passed:?}");
    assert!(wall.elapsed().unwrap() >= Duration::from_secs(3660));
    assert!(machine.elapsed() < Duration::from_secs(30), "{:?}", machine.elapsed());
}

#[test]
fn waits_of_several_runtimes_end_in_the_order_of_their_deadlines() {
    quintlet_virtual_time::start();
    let (sent, ended) = std::sync::mpsc::channel();
    let waits = [40, 10, 30, 20, 50].map(|seconds| {
        let sent = sent.clone();
        std::thread::spawn(move || {
            runtime().block_on(async {
                for _ in 0..10 {
                    sleep(Duration::from_secs(seconds)).await;
                }
            });
            sent.send(seconds).unwrap();
        })
    });
    for wait in waits {
        wait.join().unwrap();
    }
    drop(sent);
    assert_eq!(ended.iter().collect::<Vec<_>>(), [10, 20, 30, 40, 50]);
}

#[test]
fn a_deadline_does_not_pass_while_another_thread_works_for_the_answer() {
    quintlet_virtual_time::start();
    let (ours, theirs) = StdStream::pair().unwrap();
    let server = std::thread::spawn(move || {
        runtime().block_on(async {
            theirs.set_nonblocking(true).unwrap();
            let mut stream = UnixStream::from_std(theirs).unwrap();
            let mut request = [0];
            for _ in 0..200 {
                stream.read_exact(&mut request).await.unwrap();
                // Work on the thread of the runtime, and on a thread for files.
                let before = Machine::now();
                let mut sum = 0_u64;
                while before.elapsed() < Duration::from_millis(10) {
                    sum = std::hint::black_box(sum + 1);
                }
                #[expect(
                    clippy::disallowed_methods,
                    reason = "this crate depends on no other, and a panic fails the test"
                )]
                let file = tokio::task::spawn_blocking(|| {
                    let dir = tempfile::tempdir().unwrap();
                    std::fs::write(dir.path().join("file"), vec![0; 1 << 16]).unwrap();
                    std::fs::read(dir.path().join("file")).unwrap().len()
                });
                assert_eq!(file.await.unwrap(), 1 << 16);
                stream.write_all(&request).await.unwrap();
            }
        });
    });
    runtime().block_on(async {
        ours.set_nonblocking(true).unwrap();
        let mut stream = UnixStream::from_std(ours).unwrap();
        for number in 0..200 {
            let exchange = async {
                stream.write_all(&[number]).await.unwrap();
                let mut answer = [0];
                stream.read_exact(&mut answer).await.unwrap();
                answer
            };
            // An hour would pass at once if the server's work were not seen.
            let answer = timeout(Duration::from_secs(3600), exchange).await;
            assert_eq!(answer.expect("the server works"), [number]);
        }
    });
    server.join().unwrap();
    assert!(quintlet_virtual_time::ahead() < Duration::from_secs(3600));
}

#[test]
fn the_machines_time_passes_while_a_child_runs() {
    quintlet_virtual_time::start();
    let mut child = Command::new("sleep").arg("0.5").spawn().unwrap();
    runtime().block_on(async {
        let waited = timeout(Duration::from_secs(3600), async {
            while child.try_wait().unwrap().is_none() {
                sleep(Duration::from_millis(10)).await;
            }
        });
        waited.await.expect("an hour has not passed");
    });
    assert!(quintlet_virtual_time::ahead() < Duration::from_secs(10));
}

#[test]
fn a_deadline_passes_while_a_thread_works_for_longer() {
    quintlet_virtual_time::start();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let busy = std::thread::spawn(move || while stopped.try_recv().is_err() {});
    let machine = Machine::now();
    runtime().block_on(async { sleep(Duration::from_millis(300)).await });
    assert!(machine.elapsed() >= Duration::from_millis(250), "{:?}", machine.elapsed());
    stop.send(()).unwrap();
    busy.join().unwrap();
}
