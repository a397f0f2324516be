//! The device plugin as a program, for machines that restart:
//! `device-plugin [--cdi] ROOT RESOURCE DEVICE...`.

use std::error::Error;
use std::path::PathBuf;
use std::time::Duration;

use quintlet_device_plugin::TestPlugin;

/// Interval between checks for the agent's socket, and for its restarts.
const STEP: Duration = Duration::from_secs(1);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1).peekable();
    let cdi = args.next_if(|arg| arg == "--cdi").is_some();
    let (Some(root), Some(resource)) = (args.next(), args.next()) else {
        return Err("usage: device-plugin [--cdi] ROOT RESOURCE DEVICE...".into());
    };
    let devices: Vec<String> = args.collect();
    let devices: Vec<&str> = devices.iter().map(String::as_str).collect();
    let dir = PathBuf::from(root).join("device-plugins");
    let (agent, socket) = (dir.join("kubelet.sock"), dir.join("device-plugin.sock"));
    loop {
        if agent.exists() {
            let _ = std::fs::remove_file(&socket);
            let plugin = TestPlugin::start(&socket, &devices);
            // A real runtime refuses CDI devices that no file describes.
            if !cdi {
                plugin.leave_out_cdi_devices();
            }
            // The agent may be about to end. An agent that starts removes the sockets of plugins.
            if plugin.register(&agent, &resource).await.is_ok() {
                while socket.exists() {
                    tokio::time::sleep(STEP).await;
                }
            }
        }
        tokio::time::sleep(STEP).await;
    }
}
