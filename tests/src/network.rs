//! Simulates a network on this machine: each host is a network namespace, linked to one switch by a cable that tests
//! can cut.
//!
//! ```text
//!   store       10.77.0.2 ───────┐
//!   scheduler   10.77.0.3 ───────┼── switch: a bridge in its own namespace
//!   executor-1  10.77.0.4 ──╳    │   cut: its port leaves the bridge
//!   driver      10.77.0.5 ───────┘
//! ```
//!
//! A host does not notice the cut. Its link stays up, the neighbours' hardware addresses are permanent, and packets
//! vanish in both directions without a reset or ICMP message. [`Host::reconnect`] returns how many packets vanished, so
//! that a test can prove the cut.
//!
//! The namespaces have no names. Open files of this process and the processes in them keep them alive. When these end,
//! for whatever reason, the namespaces, links and bridge disappear. Nothing needs cleanup, and parallel tests do not
//! interfere. Only the network is separate: hosts share files and processes with the machine.
//!
//! A namespace requires CAP_SYS_ADMIN, a link CAP_NET_ADMIN, and both iproute2's `ip` (`scripts/setup` installs it).
//! Without them a test prints its name and is skipped, because most developer containers lack them. With `CI` set, or
//! `STILLHOUSE_NETNS=must` (as in `.ci/run`), the test fails instead, so that a gate cannot pass without it.
//! `STILLHOUSE_NETNS=skip` is for a CI that cannot provide them.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::Value;

/// A network: a switch and its hosts.
pub struct Network {
    switch: Arc<File>,
    hosts: Vec<Host>,
}

/// A host of the network. Clones refer to the same host.
#[derive(Clone)]
pub struct Host(Arc<Inner>);

struct Inner {
    name: String,
    number: u8,
    namespace: Arc<File>,
    switch: Arc<File>,
    /// Number of packets it had sent when it was cut off.
    cut: Mutex<Option<u64>>,
}

impl Network {
    /// Creates a network without hosts. Returns `None` and prints the reason if this machine does not allow it.
    ///
    /// # Panics
    /// If it is not allowed but required; see the module.
    pub fn start() -> Option<Self> {
        match create_switch() {
            Ok(switch) => Some(Self { switch: Arc::new(switch), hosts: Vec::new() }),
            Err(e) => {
                let test = std::thread::current().name().unwrap_or("a test").to_owned();
                let message = format!("{test}: network namespaces are not available: {e}");
                assert!(!is_required(), "{message}; valid: root with CAP_SYS_ADMIN and CAP_NET_ADMIN, and iproute2");
                eprintln!("skipped: {message}");
                None
            }
        }
    }

    /// Adds a host.
    pub fn host(&mut self, name: &str) -> Host {
        let number = u8::try_from(self.hosts.len() + 2).unwrap();
        let namespace = Arc::new(create_namespace().unwrap());
        let host =
            Inner { name: name.to_owned(), number, namespace, switch: Arc::clone(&self.switch), cut: Mutex::default() };
        let (port, file) = (host.port(), host.namespace.as_raw_fd());
        let mut switch =
            ip(["link", "add", &port, "type", "veth", "peer", "name", "eth0", "address", &mac_address(number)]);
        switch.arg("netns").arg(format!("/proc/{}/fd/{file}", std::process::id()));
        ip_output(&mut switch, &self.switch);
        ip_output(&mut ip(["link", "set", &port, "master", "switch", "up"]), &self.switch);
        ip_output(&mut ip(["link", "set", "lo", "up"]), &host.namespace);
        ip_output(&mut ip(["addr", "add", &format!("{}/24", address(number)), "dev", "eth0"]), &host.namespace);
        ip_output(&mut ip(["link", "set", "eth0", "up"]), &host.namespace);
        for other in &self.hosts {
            for (of, known) in [(&host, other.0.number), (other.0.as_ref(), number)] {
                let (address, hardware) = (address(known).to_string(), mac_address(known));
                let neighbour = ["neigh", "replace", &address, "lladdr", &hardware, "dev", "eth0", "nud", "permanent"];
                ip_output(&mut ip(neighbour), &of.namespace);
            }
        }
        let host = Host(Arc::new(host));
        self.hosts.push(host.clone());
        host
    }
}

impl Host {
    /// The host's IP address.
    pub fn address(&self) -> Ipv4Addr {
        address(self.0.number)
    }

    /// Makes a command run in this host.
    pub fn attach(&self, command: &mut Command) {
        enter_on_exec(command, &self.0.namespace);
    }

    /// Moves this thread into the host until the returned value is dropped.
    pub fn enter(&self) -> EnteredHost {
        let back = File::open(OWN_NAMESPACE).unwrap();
        join_namespace(&self.0.namespace).unwrap();
        EnteredHost { back, _not_send: PhantomData }
    }

    /// Cuts the host off.
    pub fn cut(&self) {
        let mut cut = self.0.cut.lock().unwrap();
        assert!(cut.is_none(), "{} is already cut off from the network", self.0.name);
        ip_output(&mut ip(["link", "set", &self.0.port(), "nomaster"]), &self.0.switch);
        *cut = Some(self.0.sent());
    }

    /// Reconnects the host. Returns the number of its packets that vanished meanwhile.
    pub fn reconnect(&self) -> u64 {
        let before = self
            .0
            .cut
            .lock()
            .unwrap()
            .take()
            .unwrap_or_else(|| panic!("{} is not cut off from the network", self.0.name));
        let vanished = self.0.sent() - before;
        ip_output(&mut ip(["link", "set", &self.0.port(), "master", "switch"]), &self.0.switch);
        vanished
    }
}

impl Inner {
    /// Name of the host's port at the switch.
    fn port(&self) -> String {
        format!("port-{}", self.number)
    }

    /// Number of packets that the switch has received from it.
    fn sent(&self) -> u64 {
        let shown = ip_output(&mut ip(["-s", "-j", "link", "show", "dev", &self.port()]), &self.switch);
        let shown: Value = serde_json::from_str(&shown).unwrap();
        shown[0]["stats64"]["rx"]["packets"].as_u64().unwrap()
    }
}

/// Keeps this thread in a host.
pub struct EnteredHost {
    back: File,
    _not_send: PhantomData<*const ()>,
}

impl Drop for EnteredHost {
    fn drop(&mut self) {
        if let Err(e) = join_namespace(&self.back) {
            // Abort: anything this thread did next would happen in the wrong namespace.
            eprintln!("a thread cannot leave its network namespace: {e}");
            std::process::abort();
        }
    }
}

const OWN_NAMESPACE: &str = "/proc/thread-self/ns/net";

fn address(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, number)
}

fn mac_address(number: u8) -> String {
    format!("02:00:0a:4d:00:{number:02x}")
}

/// Whether tests that need a network must not be skipped.
fn is_required() -> bool {
    let says = |name: &str, text: &str| std::env::var_os(name).is_some_and(|value| value == OsStr::new(text));
    says("STILLHOUSE_NETNS", "must") || (std::env::var_os("CI").is_some() && !says("STILLHOUSE_NETNS", "skip"))
}

fn create_switch() -> io::Result<File> {
    let namespace = create_namespace()?;
    try_ip(&mut ip(["link", "add", "switch", "type", "bridge"]), &namespace)?;
    try_ip(&mut ip(["link", "set", "switch", "up"]), &namespace)?;
    Ok(namespace)
}

/// Creates a network namespace that lives while the file is open or a process is in it.
fn create_namespace() -> io::Result<File> {
    let made = std::thread::spawn(|| {
        // SAFETY: `unshare` takes only numbers, and this thread ends here.
        if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
            return Err(io::Error::last_os_error());
        }
        File::open(OWN_NAMESPACE)
    });
    made.join().unwrap()
}

fn join_namespace(namespace: &File) -> io::Result<()> {
    // SAFETY: The descriptor is open.
    match unsafe { libc::setns(namespace.as_raw_fd(), libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn enter_on_exec(command: &mut Command, namespace: &Arc<File>) {
    let namespace = Arc::clone(namespace);
    // SAFETY: Between fork and exec, this makes one system call and touches no memory of the parent.
    unsafe { command.pre_exec(move || join_namespace(&namespace)) };
}

fn ip<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new("ip");
    command.args(arguments);
    command
}

/// Runs iproute2's `ip` in a namespace and returns its output.
fn try_ip(command: &mut Command, namespace: &File) -> io::Result<String> {
    enter_on_exec(command, &Arc::new(namespace.try_clone()?));
    let ran = command.stdin(Stdio::null()).output().map_err(|e| io::Error::new(e.kind(), format!("ip: {e}")))?;
    if ran.status.success() {
        return Ok(String::from_utf8_lossy(&ran.stdout).into_owned());
    }
    Err(io::Error::other(format!("{command:?}: {}", String::from_utf8_lossy(&ran.stderr).trim())))
}

#[track_caller]
fn ip_output(command: &mut Command, namespace: &File) -> String {
    try_ip(command, namespace).unwrap()
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_millis(300);

    #[test]
    fn what_a_host_sends_arrives_unless_it_is_cut_off() {
        let Some(mut network) = Network::start() else { return };
        let (a, b) = (network.host("a"), network.host("b"));
        let listener = {
            let _inside = a.enter();
            TcpListener::bind((a.address(), 7000)).unwrap()
        };
        let at = (a.address(), 7000).into();
        let mut sent = {
            let _inside = b.enter();
            TcpStream::connect_timeout(&at, SOON).unwrap()
        };
        let mut received = listener.accept().unwrap().0;
        let mut byte = [0];
        sent.write_all(b"1").unwrap();
        received.read_exact(&mut byte).unwrap();

        // while cut off, neither end gets an error; a byte sent meanwhile arrives after the reconnection
        b.cut();
        sent.write_all(b"2").unwrap();
        received.set_read_timeout(Some(SOON)).unwrap();
        assert_eq!(received.read(&mut byte).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        {
            let _inside = b.enter();
            let refused = TcpStream::connect_timeout(&at, SOON).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::TimedOut);
        }
        assert!(b.reconnect() > 0);
        received.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        received.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"2");

        // a command runs in its host; this thread is in no host
        let mut shown = ip(["-j", "addr", "show", "dev", "eth0"]);
        a.attach(&mut shown);
        let shown: Value = serde_json::from_slice(&shown.output().unwrap().stdout).unwrap();
        assert_eq!(shown[0]["addr_info"][0]["local"], a.address().to_string());
        let own = std::fs::read_link(OWN_NAMESPACE).unwrap();
        assert_eq!(own, std::fs::read_link("/proc/self/ns/net").unwrap());
    }
}
