//! Many small questions and their answers over one request that stays open. What Raft says all the time has no use
//! for the ceremony of a request each: a head to pack and unpack on both sides, a stream to open and close. What is
//! ready at the same time leaves together.
//!
//! A question is its length, a number, a path and a body; an answer its length, the number, a status as HTTP has it
//! and a body. Numbers are big-endian; answers come in any order.

use std::{
    collections::HashMap,
    future::Future,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    task::{Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures::stream;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Body, Frame};
use tokio::sync::{Semaphore, mpsc, oneshot};

use super::{
    PeerBody,
    client::{ANSWER_BYTES_MAX, CallError},
};

/// Where an exchange is opened.
pub const EXCHANGE_PATH: &str = "/exchange";
/// Longest question; a longer one is a request of its own.
pub const QUESTION_BYTES_MAX: usize = 256 * 1024;
/// Questions of one exchange that are being answered.
const ANSWERED_AT_ONCE: usize = 32_768;
/// Questions and answers that wait to be sent.
const WAITING_MAX: usize = 4096;
/// What leaves together, at most.
const TOGETHER_MAX: usize = 256;

/// Bytes of the length, and of the number.
const LENGTH: usize = 4;
const NUMBER: usize = 8;

/// An exchange, for who asks.
pub(super) struct Exchange {
    questions: mpsc::Sender<Bytes>,
    waiting: Arc<Waiting>,
    next: AtomicU64,
}

type Asking = HashMap<u64, oneshot::Sender<(StatusCode, Bytes)>>;

/// Who waits for an answer; `None` once none will come.
struct Waiting(Mutex<Option<Asking>>);

impl Waiting {
    fn all(&self) -> MutexGuard<'_, Option<Asking>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn answer(&self, mut answer: Bytes) {
        let (number, status) = (answer.get_u64(), answer.get_u16());
        let waits = self.all().as_mut().and_then(|all| all.remove(&number));
        if let (Some(waits), Ok(status)) = (waits, StatusCode::from_u16(status)) {
            // Whoever asked may have given up.
            let _ = waits.send((status, answer));
        }
    }
}

impl Exchange {
    /// The request that opens it, and the exchange.
    pub(super) fn open() -> (Request<PeerBody>, Self) {
        let (questions, receiver) = mpsc::channel(WAITING_MAX);
        let body = sent_together(receiver);
        let request = Request::post(format!("https://peer{EXCHANGE_PATH}")).body(body);
        let waiting = Arc::new(Waiting(Mutex::new(Some(HashMap::new()))));
        let exchange = Self { questions, waiting, next: AtomicU64::new(0) };
        (request.expect("our own paths are paths"), exchange)
    }

    /// Hands answers to those who wait for them until there are no more.
    pub(super) fn listen<B>(&self, body: B) -> impl Future<Output = ()> + use<B>
    where
        B: Body<Data = Bytes> + Unpin,
    {
        let waiting = Arc::clone(&self.waiting);
        async move {
            let mut parts = Parts { body, bytes: BytesMut::new(), longest: ANSWER_BYTES_MAX };
            while let Some(answer) = parts.next().await {
                if answer.len() >= NUMBER + 2 {
                    waiting.answer(answer);
                }
            }
            *waiting.all() = None;
        }
    }

    /// No answer will come any more; whoever waits hears this status, if there is one.
    pub(super) fn end(&self, status: Option<StatusCode>) {
        let waiting = self.waiting.all().take().unwrap_or_default();
        if let Some(status) = status {
            for waits in waiting.into_values() {
                let _ = waits.send((status, Bytes::new()));
            }
        }
    }

    /// Whether answers may still come.
    pub(super) fn is_open(&self) -> bool {
        self.waiting.all().is_some() && !self.questions.is_closed()
    }

    /// Asks, and waits so long for the answer.
    pub(super) async fn ask(
        &self,
        path: &str,
        body: &[u8],
        within: Duration,
    ) -> Result<(StatusCode, Bytes), CallError> {
        let number = self.next.fetch_add(1, Relaxed);
        let question = question(number, path, body);
        let (sender, receiver) = oneshot::channel();
        let ended = || CallError::Unreached("the connection has just ended".to_owned());
        self.waiting.all().as_mut().ok_or_else(ended)?.insert(number, sender);
        let _forgotten = Forgotten { waiting: &self.waiting, number };
        let asked = async {
            self.questions.send(question).await.map_err(|_| ended())?;
            receiver.await.map_err(|_| CallError::Broken("the connection has ended".to_owned()))
        };
        let late = |_| CallError::Broken(format!("no answer within {} ms", within.as_millis()));
        tokio::time::timeout(within, asked).await.map_err(late)?
    }
}

/// Whoever has an answer or gave up waits no longer.
struct Forgotten<'e> {
    waiting: &'e Waiting,
    number: u64,
}

impl Drop for Forgotten<'_> {
    fn drop(&mut self) {
        if let Some(all) = self.waiting.all().as_mut() {
            all.remove(&self.number);
        }
    }
}

fn question(number: u64, path: &str, body: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(LENGTH + NUMBER + 1 + path.len() + body.len());
    bytes.put_u32(short(NUMBER + 1 + path.len() + body.len()));
    bytes.put_u64(number);
    bytes.put_u8(u8::try_from(path.len()).expect("our own paths are short"));
    bytes.extend_from_slice(path.as_bytes());
    bytes.extend_from_slice(body);
    bytes.freeze()
}

fn answer(number: u64, said: &Result<Bytes, StatusCode>) -> Bytes {
    let (status, body) = match said {
        Ok(body) => (StatusCode::OK, body.as_ref()),
        Err(status) => (*status, &[][..]),
    };
    let mut bytes = BytesMut::with_capacity(LENGTH + NUMBER + 2 + body.len());
    bytes.put_u32(short(NUMBER + 2 + body.len()));
    bytes.put_u64(number);
    bytes.put_u16(status.as_u16());
    bytes.extend_from_slice(body);
    bytes.freeze()
}

fn short(length: usize) -> u32 {
    u32::try_from(length).expect("far below four gigabytes")
}

/// The number, path and body of a question.
fn read(mut question: Bytes) -> Option<(u64, String, Bytes)> {
    if question.len() < NUMBER + 1 {
        return None;
    }
    let (number, length) = (question.get_u64(), usize::from(question.get_u8()));
    if question.len() < length {
        return None;
    }
    let path = question.split_to(length);
    Some((number, String::from_utf8(path.to_vec()).ok()?, question))
}

/// A body of what is put into the channel.
fn sent_together(mut receiver: mpsc::Receiver<Bytes>) -> PeerBody {
    let mut ready = Vec::with_capacity(TOGETHER_MAX);
    let all = stream::poll_fn(move |context| {
        let some = ready!(receiver.poll_recv_many(context, &mut ready, TOGETHER_MAX));
        let together = match some {
            0 => None,
            1 => ready.pop(),
            _ => Some(Bytes::from(ready.concat())),
        };
        ready.clear();
        Poll::Ready(together.map(|bytes| Ok(Frame::data(bytes))))
    });
    BodyExt::boxed(StreamBody::new(all))
}

/// What comes over a body, one after the other.
struct Parts<B> {
    body: B,
    bytes: BytesMut,
    longest: usize,
}

impl<B: Body<Data = Bytes> + Unpin> Parts<B> {
    /// `None` at the end, and where nothing sensible follows.
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(length) = self.bytes.first_chunk::<LENGTH>() {
                let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
                if length > self.longest {
                    return None;
                }
                if self.bytes.len() >= LENGTH + length {
                    self.bytes.advance(LENGTH);
                    return Some(self.bytes.split_to(length).freeze());
                }
            }
            let frame = self.body.frame().await?.ok()?;
            self.bytes.extend_from_slice(frame.data_ref()?);
        }
    }
}

/// Answers the questions that come over this body with the answers that follow over the one that is given back.
pub fn attend<B, F>(body: B, answers: impl Fn(String, Bytes) -> F + Send + 'static) -> PeerBody
where
    B: Body<Data = Bytes> + Send + Unpin + 'static,
    F: Future<Output = Result<Bytes, StatusCode>> + Send + 'static,
{
    let (sender, receiver) = mpsc::channel(WAITING_MAX);
    let turns = Arc::new(Semaphore::new(ANSWERED_AT_ONCE));
    tokio::spawn(async move {
        let longest = NUMBER + 1 + usize::from(u8::MAX) + QUESTION_BYTES_MAX;
        let mut parts = Parts { body, bytes: BytesMut::new(), longest };
        while let Some((number, path, question)) = parts.next().await.and_then(read) {
            let Ok(turn) = Arc::clone(&turns).acquire_owned().await else { return };
            let (said, sender) = (answers(path, question), sender.clone());
            tokio::spawn(async move {
                let _turn = turn;
                // Whoever asked may be gone.
                let _ = sender.send(answer(number, &said.await)).await;
            });
        }
    });
    sent_together(receiver)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    fn in_pieces(bytes: &[u8], size: usize) -> impl Body<Data = Bytes> + Unpin + use<> {
        let pieces: Vec<_> = bytes.chunks(size).map(Bytes::copy_from_slice).collect();
        let pieces = pieces.into_iter().map(|piece| Ok::<_, io::Error>(Frame::data(piece)));
        StreamBody::new(stream::iter(pieces))
    }

    fn asked() -> Vec<u8> {
        (0..50).flat_map(|number| question(number, "/double", &[7; 300]).to_vec()).collect()
    }

    async fn answered(bytes: &[u8], size: usize) -> Vec<(u64, u16, usize)> {
        let body = attend(in_pieces(bytes, size), async |path: String, body: Bytes| {
            tokio::task::yield_now().await;
            match path.as_str() {
                "/double" => Ok(Bytes::from([&body[..], &body].concat())),
                _ => Err(StatusCode::NOT_FOUND),
            }
        });
        let mut parts = Parts { body, bytes: BytesMut::new(), longest: 10_000 };
        let mut found = vec![];
        while let Some(mut answer) = parts.next().await {
            found.push((answer.get_u64(), answer.get_u16(), answer.len()));
        }
        found.sort_unstable();
        found
    }

    #[tokio::test]
    async fn each_question_gets_its_answer_however_it_is_cut() {
        let expected: Vec<_> = (0..50).map(|number| (number, 200, 600)).collect();
        for size in [1, 7, 311, 100_000] {
            assert_eq!(answered(&asked(), size).await, expected, "pieces of {size}");
        }
        let unknown = question(3, "/else", b"");
        assert_eq!(answered(&unknown, 5).await, [(3, 404, 0)]);
    }

    #[tokio::test]
    async fn nonsense_ends_the_exchange() {
        let long = (NUMBER + 2 + 255 + QUESTION_BYTES_MAX + 1) as u32;
        let odd = [
            &long.to_be_bytes()[..],
            &3_u32.to_be_bytes(),
            &[0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 1, 200],
            &[0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, 1, 2, 0xff, 0xfe],
        ];
        for odd in odd {
            let bytes = [odd, &[0; 64], &question(1, "/double", b"x")].concat();
            assert_eq!(answered(&bytes, 64).await, [], "{odd:?}");
        }
    }

    #[tokio::test]
    async fn whoever_waits_hears_that_the_connection_ended() {
        let (request, exchange) = Exchange::open();
        let exchange = Arc::new(exchange);
        let asks = |path: &'static str| {
            let exchange = Arc::clone(&exchange);
            tokio::spawn(async move { exchange.ask(path, b"", Duration::from_secs(60)).await })
        };
        let (first, second) = (asks("/a"), asks("/b"));
        let mut questions =
            Parts { body: request.into_body(), bytes: BytesMut::new(), longest: 1000 };
        let (number, path, _) = questions.next().await.and_then(read).expect("a question");
        assert_eq!(path, "/a");
        questions.next().await.expect("another one");
        let said = answer(number, &Ok(Bytes::from_static(b"yes")));
        exchange.listen(in_pieces(&said, 4)).await;
        let (status, body) = first.await.expect("no panic").expect("answered");
        assert_eq!((status.as_u16(), &body[..]), (200, &b"yes"[..]));
        assert!(matches!(second.await.expect("no panic"), Err(CallError::Broken(_))));
        assert!(!exchange.is_open());
        let late = exchange.ask("/c", b"", Duration::from_secs(60)).await;
        assert!(matches!(late, Err(CallError::Unreached(_))));
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_gives_up_is_forgotten() {
        let (_request, exchange) = Exchange::open();
        let late = exchange.ask("/a", b"", Duration::from_secs(1)).await;
        assert!(matches!(late, Err(CallError::Broken(_))));
        assert!(exchange.waiting.all().as_ref().is_some_and(HashMap::is_empty));
    }
}
