//! Prints each exit of a container with its reason. An example of the crate `quintlet-proto`:
//!
//!     cargo run -p quintlet-proto --example exits -- /run/quintlet/subscribe/pleg/subscribe.sock
#![allow(clippy::print_stdout, clippy::print_stderr, clippy::disallowed_methods)]

use std::collections::HashSet;
use std::time::Duration;

use quintlet_proto::subscribe::v1::containers_client::ContainersClient;
use quintlet_proto::subscribe::v1::watch_containers_event::Event;
use quintlet_proto::subscribe::v1::{ContainerState, Cursor, PodContainers, WatchContainersRequest};

/// Exits that were seen: UID of the pod, name of the container, restart count.
type Seen = HashSet<(String, String, u32)>;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let socket = std::env::args().nth(1).unwrap_or("/run/quintlet/subscribe/pleg/subscribe.sock".to_owned());
    let (mut cursor, mut seen) = (None, Seen::new());
    loop {
        // A stream continues after the last cursor.
        let end = watch(&format!("unix://{socket}"), &mut cursor, &mut seen).await;
        eprintln!("the stream has ended: {end:?}");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

async fn watch(
    socket: &str,
    cursor: &mut Option<Cursor>,
    seen: &mut Seen,
) -> Result<(), Box<dyn std::error::Error>> {
    let mut client = ContainersClient::connect(socket.to_owned()).await?;
    let request = WatchContainersRequest { hello: None, resume: *cursor };
    let mut events = client.watch(request).await?.into_inner();
    let mut present = HashSet::new();
    while let Some(event) = events.message().await? {
        *cursor = event.cursor.or(*cursor);
        match event.event {
            // Before the first cursor, the exits are older than this program.
            Some(Event::Pod(pod)) => {
                take(&pod, seen, cursor.is_some());
                present.insert(pod.uid);
            }
            Some(Event::Gone(pod)) => {
                seen.retain(|(uid, ..)| *uid != pod.uid);
                present.remove(&pod.uid);
            }
            Some(Event::SnapshotBegin(_)) => present.clear(),
            // Pods that are not in a snapshot are gone.
            Some(Event::SnapshotEnd(_)) => seen.retain(|(uid, ..)| present.contains(uid)),
            _ => {}
        }
    }
    Ok(())
}

fn take(pod: &PodContainers, seen: &mut Seen, prints: bool) {
    for exit in pod.containers.iter().filter(|container| container.state() == ContainerState::Exited) {
        if seen.insert((pod.uid.clone(), exit.name.clone(), exit.restart_count)) && prints {
            println!("{}/{} {}: {} {}", pod.namespace, pod.name, exit.name, exit.exit_code, exit.reason);
        }
    }
}
