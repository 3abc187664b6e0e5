//! A name server (RFC 1035) that answers as a test wants, the second time otherwise than the first.

use std::{
    collections::HashMap,
    net::{IpAddr, UdpSocket},
    sync::{Arc, Mutex, PoisonError},
    thread,
    time::Duration,
};

const A: u16 = 1;
const AAAA: u16 = 28;
const NO_SUCH_NAME: u8 = 3;

/// What a name means, look-up by look-up; after the last it begins anew.
pub type Answers = Vec<Vec<IpAddr>>;

#[derive(Default)]
struct Names {
    meanings: HashMap<String, Answers>,
    asked: HashMap<(String, u16), usize>,
}

/// The server; it ends with its value.
pub struct NameServer(Arc<Mutex<Names>>);

impl NameServer {
    /// Answers whoever asks at this socket.
    pub fn on(socket: UdpSocket) -> Self {
        let names = Arc::new(Mutex::new(Names::default()));
        let known = Arc::downgrade(&names);
        socket.set_read_timeout(Some(Duration::from_millis(200))).expect("it is a socket");
        thread::spawn(move || {
            let mut question = [0; 1500];
            while let Some(names) = known.upgrade() {
                let Ok((length, from)) = socket.recv_from(&mut question) else { continue };
                let mut names = names.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(answer) = answer(&mut names, &question[..length]) {
                    let _ = socket.send_to(&answer, from);
                }
            }
        });
        Self(names)
    }

    /// From now on this name means that.
    pub fn set(&self, name: &str, answers: Answers) {
        let mut names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.meanings.insert(name.to_owned(), answers);
    }

    /// How often somebody asked for a name's IPv4 addresses.
    pub fn asked(&self, name: &str) -> usize {
        let names = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        names.asked.get(&(name.to_owned(), A)).copied().unwrap_or(0)
    }
}

/// The answer to a question for one name.
fn answer(names: &mut Names, question: &[u8]) -> Option<Vec<u8>> {
    let (mut name, mut at) = (vec![], 12);
    while *question.get(at)? > 0 {
        let end = at + 1 + usize::from(question[at]);
        name.push(String::from_utf8_lossy(question.get(at + 1..end)?).to_lowercase());
        at = end;
    }
    let end = at + 5;
    let kind = u16::from_be_bytes([*question.get(at + 1)?, *question.get(at + 2)?]);
    let name = name.join(".");
    let count = names.asked.entry((name.clone(), kind)).or_default();
    let turn = *count;
    *count += 1;
    let meaning = names.meanings.get(&name);
    let found = meaning.map(|all| all[turn % all.len()].clone()).unwrap_or_default();
    let found: Vec<IpAddr> = found
        .into_iter()
        .filter(|one| if one.is_ipv4() { kind == A } else { kind == AAAA })
        .collect();
    let status = if meaning.is_some() { 0 } else { NO_SUCH_NAME };
    let mut reply = question.get(..2)?.to_vec();
    reply.extend([0x81, 0x80 | status, 0, 1, 0, u8::try_from(found.len()).ok()?, 0, 0, 0, 0]);
    reply.extend_from_slice(question.get(12..end)?);
    for address in found {
        let (kind, bytes) = match address {
            IpAddr::V4(v4) => (A, v4.octets().to_vec()),
            IpAddr::V6(v6) => (AAAA, v6.octets().to_vec()),
        };
        // The name of the question, class IN, good for no time at all.
        reply.extend([0xc0, 12]);
        reply.extend(kind.to_be_bytes());
        reply.extend([0, 1, 0, 0, 0, 0, 0, u8::try_from(bytes.len()).ok()?]);
        reply.extend(bytes);
    }
    Some(reply)
}
