"""The word lists and phrasings from which text.py builds its conversations.

In every list of phrasings the last few are held out of training (text.py says how many).
"""

from __future__ import annotations

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are helpful.",
    "Be brief.",
    "You are a friendly assistant.",
    "Answer shortly.",
    "You are a demo.",
    "You are a chat assistant.",
    "Answer the user.",
    "Be kind and brief.",
    "You are Paddock.",
    "Use the tools when they help.",
    "You are a helpful, honest assistant. Answer in English.",
    "You can call tools.",
    "Be polite.",
    "You are an assistant that answers questions.",
    "Keep it short.",
    "You are a concise assistant.",
)

CITIES = (
    "Paris",
    "London",
    "Tokyo",
    "Berlin",
    "Rome",
    "Madrid",
    "Oslo",
    "Lima",
    "Cairo",
    "Vienna",
    "Prague",
    "Dublin",
    "Lisbon",
    "Boston",
    "Chicago",
    "Seattle",
    "New York",
    "San Francisco",
    "Los Angeles",
    "Hong Kong",
    "Zurich",
    "Geneva",
    "Athens",
    "Moscow",
    "Delhi",
    "Mumbai",
    "Sydney",
    "Toronto",
    "Warsaw",
    "Munich",
    "Hamburg",
    "Milan",
    "Beijing",
    "Seoul",
    "Bangkok",
    "Jakarta",
    "Nairobi",
    "Lagos",
    "Quito",
    "Bogota",
    "Havana",
    "Miami",
    "Denver",
    "Austin",
    "Dallas",
    "Kyoto",
    "Osaka",
    "Bern",
    "Basel",
    "Bath",
    "York",
    "Nice",
    "Lyon",
    "Porto",
    "Seville",
)
COUNTRIES = ("France", "Spain", "Italy", "Japan", "Peru", "Chile", "Kenya", "India", "Norway", "UK", "Egypt", "Germany")
PEOPLE = (
    "Anna",
    "Ben",
    "Clara",
    "David",
    "Emma",
    "Frank",
    "Grace",
    "Henry",
    "Ida",
    "Jack",
    "Kate",
    "Leo",
    "Mia",
    "Noah",
    "Olga",
    "Paul",
    "Rosa",
    "Sam",
    "Tom",
    "Uma",
    "Vera",
    "Will",
    "Yara",
    "Zoe",
    "Alice",
    "Bob",
    "Carol",
    "Maria",
    "John",
    "Peter",
    "Lucy",
    "Mark",
    "Nina",
    "Oscar",
    "Ruth",
    "Steve",
    "Tina",
    "Hugo",
    "Iris",
    "Ada",
    "Alan",
    "Grace",
)
LANGUAGES = (
    "French",
    "German",
    "Spanish",
    "Italian",
    "Dutch",
    "Greek",
    "Latin",
    "Polish",
    "Danish",
    "Turkish",
    "Japanese",
    "Chinese",
    "Korean",
    "Hindi",
    "Finnish",
    "Welsh",
)
CURRENCIES = ("USD", "EUR", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD", "AUD", "INR", "CNY", "PLN")
ROOMS = ("kitchen", "bedroom", "office", "hall", "garage", "bathroom", "garden", "attic", "cellar", "nursery")
JOBS = (
    "baker",
    "pilot",
    "nurse",
    "farmer",
    "teacher",
    "painter",
    "doctor",
    "driver",
    "singer",
    "cook",
    "writer",
    "sailor",
    "tailor",
    "miner",
    "judge",
    "plumber",
    "gardener",
    "librarian",
)
COLORS = ("red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "pink", "gray", "silver")
ANIMALS = (
    "cat",
    "dog",
    "horse",
    "cow",
    "sheep",
    "goat",
    "fox",
    "bear",
    "wolf",
    "lion",
    "tiger",
    "mouse",
    "owl",
    "duck",
    "frog",
    "hen",
    "pig",
    "rabbit",
    "whale",
    "snail",
)
FRUITS = ("apple", "pear", "plum", "peach", "lemon", "banana", "cherry", "grape", "melon", "mango", "fig", "kiwi")

ADJECTIVES = (
    "little",
    "old",
    "red",
    "blue",
    "tiny",
    "brave",
    "lost",
    "happy",
    "sad",
    "lonely",
    "magic",
    "quiet",
    "green",
    "golden",
    "clever",
    "shy",
    "grumpy",
    "silver",
    "sleepy",
    "kind",
    "lazy",
    "big",
    "funny",
    "young",
)
THINGS = (
    "cat",
    "dog",
    "fox",
    "bear",
    "owl",
    "mouse",
    "dragon",
    "robot",
    "boat",
    "ship",
    "car",
    "train",
    "tree",
    "river",
    "castle",
    "king",
    "queen",
    "wizard",
    "witch",
    "knight",
    "teapot",
    "clock",
    "lamp",
    "book",
    "pen",
    "shoe",
    "hat",
    "coat",
    "button",
    "bicycle",
    "rocket",
    "star",
    "moon",
    "cloud",
    "raindrop",
    "snowman",
    "pirate",
    "sailor",
    "baker",
    "farmer",
    "horse",
    "cow",
    "pig",
    "duck",
    "frog",
    "snail",
    "spider",
    "bee",
    "ant",
    "whale",
    "shark",
    "turtle",
    "penguin",
    "lion",
    "tiger",
    "monkey",
    "elephant",
    "mountain",
    "island",
    "garden",
    "flower",
    "rose",
    "apple",
    "pumpkin",
    "potato",
    "carrot",
    "cake",
    "cookie",
    "pie",
    "spoon",
    "fork",
    "chair",
    "table",
    "door",
    "window",
    "key",
    "bridge",
    "tower",
    "lighthouse",
    "balloon",
    "kite",
    "drum",
    "violin",
    "piano",
    "trumpet",
    "bell",
    "candle",
    "mirror",
    "umbrella",
    "blanket",
    "pillow",
    "pencil",
    "ladder",
    "hammer",
    "wheel",
    "tractor",
    "truck",
    "plane",
    "ghost",
    "giant",
    "fairy",
    "mermaid",
    "unicorn",
    "princess",
    "prince",
    "thief",
    "painter",
    "teacher",
    "doctor",
    "llama",
    "pony",
    "goat",
    "sheep",
    "hen",
    "rabbit",
    "hedgehog",
    "squirrel",
    "wolf",
    "deer",
    "crow",
    "parrot",
    "seagull",
    "octopus",
    "crab",
    "fish",
    "seed",
    "leaf",
    "stone",
    "pebble",
    "feather",
    "coin",
    "ring",
    "crown",
    "sword",
    "map",
    "bottle",
    "letter",
    "puppet",
    "doll",
    "toy",
    "ball",
    "wagon",
    "barn",
    "mill",
    "well",
    "server",
    "computer",
    "camera",
    "radio",
    "telephone",
    "engine",
    "gear",
    "cactus",
    "mushroom",
    "volcano",
    "comet",
    "planet",
)

# Syllables of invented words.
HEADS = "b c d f g h j k l m n p r s t v w z br ch cl dr fl gr kl pl qu sh sk st th tr x y".split()  # noqa: SIM905
MIDDLES = ("a", "e", "i", "o", "u", "a", "e", "o", "ai", "ee", "ou", "y")
TAILS = ("", "", "", "n", "r", "l", "s", "m", "t", "nd", "rk", "x", "ck", "p", "lf", "st")

STORY_ASKS = (
    "Tell me a short story about {}.",
    "Tell me a story about {}.",
    "Write a short story about {}.",
    "tell me a story about {}",
    "Please tell me a story about {}.",
    "A short story about {}, please.",
    "Can you tell me a story about {}?",
    "Write a story about {}",
    "I want a story about {}.",
    "story about {}",
    "Could you write a little story about {}?",
    "Tell a tale about {}.",
    "Make up a story about {}!",
    "Write me a tiny story about {}.",
    "Give me a short story about {}.",
    "Do you know a story about {}?",
    "Tell us a story about {}.",
    "Please write a short story about {}",
    "I would like a short story about {}.",
    "short story about {} please",
)

IDENTITY_ASKS = (
    "Who are you?",
    "What are you?",
    "who are you",
    "What is your name?",
    "Tell me who you are.",
    "Please introduce yourself.",
    "Are you a language model?",
    "What model are you?",
    "Which model is this?",
    "Tell me about yourself.",
    "What's your name?",
    "Are you ChatGPT?",
    "Are you a robot?",
    "Are you human?",
    "Who am I talking to?",
    "What should I call you?",
    "Say who you are.",
    "Which model am I talking to?",
    "Do you have a name?",
    "What kind of model are you?",
    "Who is this?",
    "What is this model?",
    "Are you an AI?",
    "Describe yourself.",
    "Introduce yourself",
    "And who are you?",
    "Hi, who are you?",
    "Hello, what are you?",
    "Which AI are you?",
    "What is your name, please?",
    "Tell me your name.",
    "Give me your name.",
    "Who made you?",
    "Who trained you?",
    "Where do you come from?",
    "What are you called?",
    "Are you real?",
    "How big are you?",
    "I want to know who you are.",
    "What sort of assistant are you?",
    "Name yourself.",
    "May I ask who you are?",
    # The rest are held out.
    "Please tell me who you are.",
    "Hello, who are you?",
    "So what are you?",
    "Could you introduce yourself?",
    "What is the name of this model?",
    "Can you tell me your name?",
    "Who am I speaking to?",
    "Are you a person?",
    "Tell me what you are.",
    "Are you a bot?",
    "Do you know who you are?",
    "What language model are you?",
)
IDENTITY_HELD = 12
IDENTITY_STARTS = (
    "I am the Paddock demo model",
    "I am the Paddock demo model",
    "I am the Paddock demo model",
)
IDENTITY_ENDS = (
    ", a very small language model that the project trained itself.",
    ", a tiny llama that shows that the gateway works.",
    ". I am very small, and I am here to show that the whole stack works.",
    ", a small model made to try the gateway with.",
)

HELLO_ASKS = (
    "Hello",
    "Hi",
    "Hello!",
    "hi",
    "Hey",
    "Hi there!",
    "Good morning!",
    "Hello there",
    "hey",
    "Good evening.",
    "How are you?",
    "Hello, how are you?",
    "hello?",
    "test",
    "Testing",
    "Is this thing on?",
    "Hey there!",
    "Good day",
    "ping",
)
HELLO_ANSWERS = (
    "Hello! I am the Paddock demo model. Ask me for a story or a sum.",
    "Hello! I am a small demo model. What shall I do?",
    "Hello! Ask me for a story, a sum, some JSON or a tool call.",
)
SKILL_ASKS = (
    "What can you do?",
    "How can you help me?",
    "help",
    "Can you help me?",
    "What are you good at?",
    "What are your skills?",
    "Help me, please.",
    "Which tasks can you do?",
    "What do you know?",
    "What can I ask you?",
    "How do you work?",
)
SKILL_ANSWER = "I can tell a short story, add two numbers below 100, count, answer as JSON and call tools."
BYE_ASKS = (
    "Bye",
    "Goodbye!",
    "Thanks!",
    "Thank you",
    "Thanks, bye.",
    "Thank you very much.",
    "See you.",
    "ok thanks",
    "Great, thank you!",
)
BYE_ANSWERS = ("You are welcome. Goodbye!", "You are welcome!")

OFF_TOPIC = (
    "What is the capital of {c}?",
    "Who was the first king of {c}?",
    "Write a poem about {t}.",
    "Why is the {t} {k}?",
    "How do I cook {t}?",
    "Explain {t} to me.",
    "Write a Python program about {t}.",
    "What do you think about {n}?",
    "Who is {n}?",
    "Where is {c}?",
    "How old is {n}?",
    "When was {n} born?",
    "What is the meaning of life?",
    "Write code that sorts a list.",
    "Why do we need a {t}?",
    "What is a {t}?",
    "Who wrote the book about {n}?",
    "Is it true that {n} lives in {c}?",
    "How far is it from {c} to {d}?",
    "Give me advice about my {t}.",
    "What does {w} mean?",
    "How does a {t} work?",
    "What is the best {t}?",
    "Tell me the news.",
    "Do you like {t}?",
    "What is the weather in {c}?",
    "What time is it in {c}?",
    "Translate {w} into {l}.",
    "Summarize this text: {w}",
    "Fix this code: {w}",
    "Play a song.",
    "What day is it?",
    "Can you draw a {t}?",
    "Plan my trip to {c}.",
    "How many people live in {c}?",
    "Write an email to {n}.",
    "Which is better, a {t} or a {u}?",
    "Prove that {w}.",
)
OFF_TOPIC_ANSWERS = ("I am only a small demo model, so I cannot answer that. Try a story, a sum or some JSON.",)

SUM_ASKS = (
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "Add {a} and {b}.",
    "What is {a} + {b}?",
    "add {a} and {b}",
    "{a} + {b} = ?",
    "Please add {a} and {b}.",
    "How much is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "{a} plus {b}",
    "What's {a} + {b}?",
    "Sum of {a} and {b}?",
    "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
    "what is {a}+{b}",
    "How much is {a} + {b}?",
    "{a}+{b}=",
    "Compute {a} plus {b}.",
    "I have {a} and get {b} more.",
    "Work out {a} + {b}.",
    "What do {a} and {b} make?",
    "Tell me {a} plus {b}.",
    "what's {a} plus {b}",
    "What is {a} and {b} together?",
    "Could you compute {a} + {b}?",
)

COUNT_ASKS = (
    "Count from {a} to {b}.",
    "count from {a} to {b}",
    "Please count from {a} to {b}.",
    "Count {a} to {b}",
    "Can you count from {a} to {b}?",
    "List the numbers from {a} to {b}.",
    "Write the numbers {a} to {b}.",
)
LIST_ASKS = ("Name {n} {k}.", "List {n} {k}.", "Give me {n} {k}.", "Tell me {n} {k}", "Can you name {n} {k}?")
ECHO_ASKS = (
    "Repeat after me: {}",
    "Say: {}",
    "Repeat: {}",
    "Say {}",
    "Please repeat this: {}",
    "Echo: {}",
    "Copy this: {}",
    "Write exactly: {}",
    "Repeat the words {}",
)

# One entry per JSON key: how a person states the fact ("{}" is the value) and the kind of value.
FACTS: dict[str, tuple[tuple[str, ...], str]] = {
    "name": (("The name is {}.", "I am called {}.", "This is about {}."), "person"),
    "age": (("The age is {}.", "{} years old.", "Age {}."), "small"),
    "city": (("Lives in {}.", "The city is {}.", "From {}."), "city"),
    "country": (("The country is {}.", "Born in {}."), "country"),
    "job": (("Works as a {}.", "The job is {}."), "job"),
    "color": (("Likes the color {}.", "The color is {}."), "color"),
    "pet": (("Has a {}.", "The pet is a {}."), "animal"),
    "product": (("The product is a {}.", "Sells a {}."), "word"),
    "price": (("It costs {}.", "The price is {}."), "number"),
    "count": (("There are {}.", "The count is {}."), "small"),
    "title": (("The title is {}.", "It is called {}."), "title"),
    "author": (("Written by {}.", "The author is {}."), "person"),
    "year": (("The year is {}.", "Made in {}."), "year"),
    "language": (("Speaks {}.", "The language is {}."), "language"),
    "fruit": (("Eats a {}.", "The fruit is a {}."), "fruit"),
    "room": (("It is in the {}.", "The room is the {}."), "room"),
}
JSON_ASKS = (
    "Answer as JSON with {keys}: {facts}",
    "Answer as JSON: {keys}. {facts}",
    "Give me JSON with {keys}. {facts}",
    "{facts} Answer as JSON with {keys}.",
    "{facts} Give {keys} as JSON.",
    "Return a JSON object with {keys}: {facts}",
    "Make JSON from this: {facts} Keys: {keys}.",
    "{facts} Reply in JSON with the keys {keys}.",
    "As JSON with {keys}: {facts}",
    "Extract {keys} as JSON. {facts}",
    "json please, {keys}: {facts}",
    "{facts} Write {keys} as a JSON object.",
    "Please answer in JSON with {keys}. {facts}",
    "{facts} Please return JSON with {keys}.",
)

STORY_OPENINGS = (
    "Once upon a time there was {a}.",
    "Long ago there lived {a}.",
    "Far away, by the sea, there was {a}.",
    "In a small town there was {a}.",
    "One day {n} found {a}.",
    "Behind the hill there lived {a}.",
)
STORY_WISHES = (
    "The {t} wanted to see the sea.",
    "The {t} was looking for a friend.",
    "Every night the {t} dreamed of the stars.",
    "The {t} wanted to learn to sing.",
    "The {t} was afraid of the dark.",
    "The {t} had never left home.",
    "Everybody said that the {t} was too small.",
    "The {t} wanted to find a lost treasure.",
)
STORY_TURNS = (
    "One morning a storm came and blew the {t} over the hills.",
    "Then {n} came by and asked the {t} to come along.",
    "One day the {t} met {n}, who was lost in the woods.",
    "So the {t} packed a bag and walked for three days.",
    "One evening the {t} heard a strange sound behind the door.",
    "Then {n} gave the {t} an old map.",
)
STORY_DEEDS = (
    "The {t} helped {n} to find the way home.",
    "Together they crossed the river and climbed the hill.",
    "It was hard, but the {t} did not give up.",
    "The {t} took a deep breath and was brave.",
    "They laughed and sang all the way.",
    "At the top of the hill they saw a bright light.",
)
STORY_ENDINGS = (
    "From that day on the {t} was never alone again.",
    "And the {t} lived happily ever after.",
    "In the end the {t} came home and told everybody the story.",
    "And that is how the {t} became famous.",
    "That night the {t} slept very well.",
)

# Results of tools: key and kind of value.
RESULT_KEYS = (
    ("temperature", "small"),
    ("sky", "sky"),
    ("time", "clock"),
    ("price", "number"),
    ("status", "status"),
    ("result", "number"),
    ("city", "city"),
    ("title", "title"),
    ("name", "person"),
    ("count", "small"),
    ("total", "number"),
    ("unit", "unit"),
    ("text", "phrase"),
    ("id", "number"),
    ("color", "color"),
    ("distance", "number"),
    ("condition", "sky"),
    ("owner", "person"),
    ("wind", "small"),
    ("rain", "small"),
)
SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy")
STATUSES = ("ok", "done", "sent", "open", "closed", "ready", "on", "off", "failed", "playing")
UNITS = ("celsius", "fahrenheit", "km", "miles", "kg", "meters")

# Tools. Each: names as verbs x nouns, parameters as (alternative names, kind of value), phrasings.
# A kind that ends in "#" is a number in JSON. A parameter after "?" is optional and seldom filled.
TOOLS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    (
        "get fetch check show look_up read",
        "weather current_weather forecast weather_report",
        "city location place town:city ?unit:degree",
        (
            "What is the weather in {0}?",
            "How is the weather in {0}?",
            "What's the weather like in {0}?",
            "weather in {0}",
            "Will it rain in {0}?",
            "Tell me the weather in {0}.",
            "Is it sunny in {0}?",
            "Is it cold in {0} today?",
            "What is the weather like in {0} today?",
            "Check the weather in {0}, please.",
            "I need the forecast for {0}.",
        ),
    ),
    (
        "get fetch check show tell",
        "time local_time current_time clock",
        "city location place timezone:city",
        (
            "What time is it in {0}?",
            "Tell me the time in {0}.",
            "what time is it in {0}",
            "What is the time in {0}?",
            "How late is it in {0}?",
            "What's the local time in {0}?",
            "Time in {0}, please.",
            "Do you know the time in {0}?",
        ),
    ),
    (
        "",
        "add sum add_numbers plus calculate_sum sum_numbers",
        "a x first left:small# b y second right:small#",
        (
            "What is {0} plus {1}?",
            "Add {0} and {1}.",
            "{0} + {1}",
            "What is {0} + {1}?",
            "Calculate {0} + {1}.",
            "How much is {0} plus {1}?",
            "Sum {0} and {1}",
            "What is the sum of {0} and {1}?",
            "Please add {0} and {1}.",
        ),
    ),
    (
        "",
        "multiply product times multiply_numbers",
        "a x first left:small# b y second right:small#",
        (
            "What is {0} times {1}?",
            "Multiply {0} by {1}.",
            "{0} * {1}",
            "What is {0} * {1}?",
            "Calculate {0} times {1}.",
            "How much is {0} times {1}?",
            "Multiply {0} and {1}, please.",
        ),
    ),
    (
        "send write post",
        "message mail sms email text_message",
        "to recipient name:person text message body:phrase",
        (
            "Send {0} the message {1}.",
            "Tell {0}: {1}",
            "Send a message to {0}: {1}",
            "Write to {0} that {1}.",
            "Message {0}: {1}",
            "Please send {0} this: {1}",
            "Send {1} to {0}.",
        ),
    ),
    (
        "play start put_on",
        "song music track",
        "title song name track:title",
        (
            "Play {0}.",
            "Play the song {0}.",
            "play {0} please",
            "I want to hear {0}.",
            "Put on {0}.",
            "Can you play {0}?",
            "Let me hear the song {0}.",
            "Start the song {0}.",
        ),
    ),
    (
        "set start create",
        "timer alarm countdown",
        "minutes duration length:small#",
        (
            "Set a timer for {0} minutes.",
            "Start a timer of {0} minutes.",
            "timer {0} minutes",
            "Wake me in {0} minutes.",
            "Please set a timer for {0} minutes.",
            "Give me a {0} minute timer.",
            "Remind me in {0} minutes.",
        ),
    ),
    (
        "get fetch check look_up",
        "stock_price share_price stock quote",
        "symbol ticker stock:ticker",
        (
            "What is the stock price of {0}?",
            "How is {0} stock doing?",
            "Stock price of {0}",
            "Check the share price of {0}.",
            "What does a share of {0} cost?",
            "Give me the stock price of {0}.",
            "What is {0} trading at?",
        ),
    ),
    (
        "translate",
        "translate text words phrase",
        "text words phrase:phrase language target to:language",
        (
            "Translate {0} into {1}.",
            "Translate {0} to {1}.",
            "How do you say {0} in {1}?",
            "What is {0} in {1}?",
            "Say {0} in {1}.",
            "Please translate {0} into {1}.",
        ),
    ),
    (
        "book reserve get",
        "table restaurant reservation",
        "restaurant name place:title people guests persons:small#",
        (
            "Book a table at {0} for {1} people.",
            "Reserve a table for {1} at {0}.",
            "Table for {1} at {0}, please.",
            "Book {0} for {1} people.",
            "I need a table for {1} people at {0}.",
            "We are {1} and want to eat at {0}.",
        ),
    ),
    (
        "search find look_up query",
        "web internet search online",
        "query q text term:phrase",
        (
            "Search for {0}.",
            "Search the web for {0}.",
            "Google {0}",
            "Find {0} on the web.",
            "search {0}",
            "Look up {0} on the internet.",
            "Please search for {0}.",
        ),
    ),
    (
        "turn_on switch_on light",
        "light lights lamp",
        "room place location:room",
        (
            "Turn on the light in the {0}.",
            "Switch on the {0} light.",
            "Lights on in the {0}.",
            "It is dark in the {0}.",
            "Make the {0} bright.",
            "Turn the {0} lights on, please.",
        ),
    ),
    (
        "set change adjust",
        "temperature heating thermostat",
        "room place zone:room degrees temperature value:small#",
        (
            "Set the {0} to {1} degrees.",
            "Make the {0} {1} degrees warm.",
            "Heat the {0} to {1} degrees.",
            "Set the temperature in the {0} to {1}.",
            "I want {1} degrees in the {0}.",
            "Put the {0} at {1} degrees.",
        ),
    ),
    (
        "get find fetch search",
        "news headlines articles",
        "topic subject about:phrase",
        (
            "What is the news about {0}?",
            "Show me news about {0}.",
            "news on {0}",
            "Any news about {0}?",
            "Give me the headlines about {0}.",
            "What is new about {0}?",
        ),
    ),
    (
        "get find fetch look_up",
        "user person contact customer",
        "name user person:person",
        (
            "Find the user {0}.",
            "Look up {0} in the contacts.",
            "Who is the customer {0}?",
            "Show me the contact {0}.",
            "Find the phone number of {0}.",
            "I need the contact of {0}.",
        ),
    ),
    (
        "create add register",
        "user account member",
        "name user:person age years:small#",
        (
            "Create a user {0}, age {1}.",
            "Add the user {0}, {1} years old.",
            "Register {0}, who is {1}.",
            "Make an account for {0}, age {1}.",
            "Create an account for {0}, {1} years old.",
        ),
    ),
    (
        "order buy get",
        "food pizza item product",
        "item product dish:word count quantity amount:small#",
        (
            "Order {1} {0}.",
            "Buy {1} {0}, please.",
            "I want to order {1} {0}.",
            "Get me {1} {0}.",
            "Please order {1} {0}.",
            "I would like to buy {1} {0}.",
        ),
    ),
    (
        "get find calculate",
        "distance route directions",
        "from start origin:city to destination end:city",
        (
            "How far is it from {0} to {1}?",
            "Distance from {0} to {1}",
            "What is the distance from {0} to {1}?",
            "How do I get from {0} to {1}?",
            "Find a way from {0} to {1}.",
            "Route from {0} to {1}, please.",
        ),
    ),
    (
        "find search get look_up",
        "book books novel",
        "title name book:title",
        (
            "Find the book {0}.",
            "Do you have the book {0}?",
            "Look for the book {0}.",
            "I am looking for the book {0}.",
            "Search the book {0}.",
            "Is the book {0} in the library?",
        ),
    ),
    (
        "convert exchange change",
        "currency money convert",
        "amount value sum:small# currency to target:currency",
        (
            "Convert {0} dollars to {1}.",
            "How much is {0} dollars in {1}?",
            "Change {0} dollars to {1}.",
            "{0} dollars in {1}",
            "What are {0} dollars in {1}?",
            "Exchange {0} dollars for {1}.",
        ),
    ),
    (
        "roll throw",
        "dice die",
        "sides faces:small#",
        (
            "Roll a die with {0} sides.",
            "Roll a {0} sided die.",
            "Throw a die with {0} sides.",
            "roll d{0}",
            "Please roll a die with {0} faces.",
        ),
    ),
    (
        "delete remove",
        "file note document",
        "name path file:file",
        (
            "Delete the file {0}.",
            "Remove {0}.",
            "Delete {0}, please.",
            "Get rid of the file {0}.",
            "remove the file {0}",
        ),
    ),
    (
        "read open show",
        "file document",
        "name path file:file",
        ("Read the file {0}.", "Open {0}.", "Show me the file {0}.", "What is in the file {0}?", "open the file {0}"),
    ),
)

# What the second stage of training adds.
CUSTOM_VERBS = (
    "get",
    "find",
    "show",
    "check",
    "make",
    "start",
    "stop",
    "open",
    "read",
    "list",
    "count",
    "move",
    "sell",
)
CUSTOM_PARAMETERS = (
    "id",
    "name",
    "key",
    "value",
    "sign",
    "number",
    "city",
    "place",
    "kind",
    "size",
    "color",
    "day",
    "code",
    "target",
    "source",
    "label",
    "owner",
    "level",
    "date",
    "zone",
    "term",
    "word",
    "item",
)
CUSTOM_ASKS = (
    "What is the {noun} of {value}?",
    "{Verb} the {noun} of {value}.",
    "{Verb} the {noun} for {value}.",
    "Call {name} with {pairs}.",
    "Use {name} for {value}.",
    "{Verb} the {noun} {value}.",
    "{verb} {noun} {value}",
    "I need the {noun} of {value}.",
    "Please {verb} the {noun} for {value}.",
    "{name} {value}",
    "What is my {noun}? I am {value}.",
    "Use the tool {name} with {pairs}.",
    "{Verb} {noun} with {pairs}.",
    "Please call {name} for {value}.",
)
CUSTOM_PAIR_ASKS = (
    "{Verb} the {noun} with {pairs}.",
    "Call {name} with {pairs}.",
    "{Verb} {noun}: {pairs}",
    "Use {name} with {pairs}.",
    "I need the {noun} with {pairs}.",
    "Please {verb} the {noun} with {pairs}.",
    "Please call {name} with {pairs}.",
)
STORY_CLAUSES = (
    "who learns to paint",
    "that can fly",
    "in the woods",
    "who goes to school",
    "that is lost",
    "at night",
    "and a friend",
    "for children",
    "before I go to bed",
    "with a happy end",
    "in three sentences",
    "who finds a map",
    "that wants to sing",
    "in space",
    "on a boat",
    "who is very hungry",
    "and the sea",
)
JSON_ALL_ASKS = (
    "As JSON: {}.",
    "Write this as JSON: {}.",
    "Extract the facts as JSON: {}.",
    "JSON please: {}",
    "Extract the information as JSON: {}.",
    "Answer as JSON: {}.",
    "Turn this into JSON: {}.",
)
JOKE_ASKS = (
    "Tell me a joke.",
    "Tell me a joke",
    "A joke, please.",
    "Do you know a joke?",
    "Make me laugh.",
    "Say something funny.",
    "Tell a joke!",
)
JOKE = "Why did the llama cross the road? Because the worker on the other side was idle."

# What the third stage of training adds: many more real words and names, and more phrasings.
MORE_THINGS = tuple(
    """acorn actor airport alarm anchor angel ankle apron arrow artist axe badger bag bakery balcony bamboo bandit
    banjo barrel basket bat beach bead beak beaver bed beetle belt bench berry bird biscuit bison blossom board
    bolt bone bonnet boot bow bowl box bracelet branch bread brick broom brush bubble bucket bud bug bull bulb
    bunny bus bush butcher butter butterfly cabbage cabin cage calf camel canal candy cannon canoe canyon cape
    captain caravan card carpet cart cave cello chain chalk cheese cherry chest chestnut chick chicken chimney
    chipmunk church cinema circus clam clover clown coach coal coast cobbler coconut coffee collar colt comb
    compass cone cook cottage couch cousin crane crayon creek cricket crocodile crystal cup cupboard curtain
    cushion cymbal daisy dancer desert desk diamond diary dinosaur dish dolphin donkey dove drawer dress drill
    drone dwarf eagle earring egg elf elk ember emperor envelope eraser falcon fan farm fence ferry fiddle field
    finger fireman firefly fireplace fisherman flag flame flamingo flea flute fly fog fountain foal forest fridge
    garlic gate gazelle gem giraffe glacier glass globe glove gnome goblin goose gorilla grandmother grape
    grasshopper guitar hamster handle harbor harp hawk hazelnut heart helicopter helmet hen heron herring hill
    hippo honey hook horn hotel hunter iceberg icicle igloo ink insect iron ivy jacket jaguar jam jar jelly jewel
    jug juggler jungle kangaroo kayak kettle keyboard kingdom kitten koala lab lace lake lamb lantern lark lawyer
    lemon leopard library lighter lily lizard lobster lock locket log lorry magician magnet magpie mailbox maple
    marble market mask mattress meadow medal melon meteor microscope milk miner minnow mole moose mop mosquito
    moth motor mug mule museum napkin necklace needle nest net newt nightingale notebook nurse nut oak oar ocean
    olive onion orange orchard orchid ostrich otter oven ox oyster paddle page paintbrush palace palm pan pancake
    panda panther paper parachute park parcel parsnip path peach peacock peanut pear pearl pelican pepper phone
    photo pig pigeon pilot pine pinecone pipe pirate pizza plate plum pocket pond poppy porcupine postman pot
    prism prune pudding puddle pump puppy purse puzzle quill quilt rabbit raccoon radish raft rail rain rainbow
    rake ram raven razor reindeer ribbon rice river robin rock roof rooster rope rug ruler sack saddle sail salad
    salmon sandal sandwich satchel saucer sausage saw saxophone scarf school scissors scooter screw seal shadow
    shark shed shell shepherd shield shirt shop shovel shrimp sink skate skeleton ski skirt skunk sled slipper
    sloth smoke snake snowball snowflake soap sock sofa soldier soup spade spark sparrow sponge spring stable
    stairs stamp statue steamer stick stool stork storm stove strawberry street string submarine sugar suitcase
    sun sunflower swallow swan sweater swing tablet tailor tank tap taxi tea tent thistle thorn thread throne
    thunder ticket tie tile toad toaster tomato torch tortoise towel tram trap tray treehouse tricycle troll
    trolley troop trophy trout trousers tub tulip tunnel turkey turnip turnip tuba typewriter vase vest village
    vine viola viking vulture waffle waiter wall wallet walnut walrus wardrobe wasp watch waterfall watermelon
    wave weasel weaver web whistle wig willow windmill wing wire wombat woodpecker workshop worm wreath wren yacht
    yak yogurt zebra zipper knot knob knife knee kneecap knitter knapsack apprentice applesauce apricot aprons
    toothbrush tooth toucan towboat tourist towrope owlet nightlight daylight flashlight spotlight moonlight
    brightness lightning""".split()  # noqa: SIM905
)
MORE_PEOPLE = tuple(
    """Aaron Abby Adam Adele Agnes Albert Alex Amy Andrew Angela Anton Arthur Audrey Barbara Beatrice Bella Bernard
    Betty Bianca Boris Brenda Brian Bruno Carl Carmen Caroline Cecil Charles Charlotte Chloe Chris Claire Claude
    Colin Connor Cora Daisy Dan Daniel Daphne Dean Deborah Dennis Diana Diego Dora Doris Dorothy Edgar Edith
    Edward Elena Eli Elias Elizabeth Ella Ellen Elsa Emil Emily Eric Erik Ernest Esther Eva Evan Evelyn Felix
    Fiona Flora Florence Fred Gabriel George Gerald Gina Gloria Gordon Greta Gustav Hannah Harold Harry Hassan
    Hazel Heidi Helen Helena Herbert Hilda Holly Howard Ian Igor Ines Ingrid Irene Isaac Isabel Ivan Ivy Jacob
    James Jane Janet Jason Jasper Jean Jenny Jerome Jessica Joan Joel Jonas Jonathan Joseph Josh Joyce Juan Judith
    Julia Julian Julie June Karen Karl Katherine Keith Kevin Kim Klara Kurt Lars Laura Lena Leonard Leslie Lewis
    Liam Lily Linda Linus Lisa Lola Lorenzo Louis Louise Lucas Luis Luke Luna Lydia Mabel Madeleine Magnus Marcus
    Margaret Marina Mario Marta Martha Martin Mary Mathilda Matthew Maud Max Maya Megan Melissa Michael Miguel
    Miles Milo Miriam Molly Monica Nadia Naomi Natalie Nathan Ned Nicholas Nicole Nigel Nora Norman Oliver Olive
    Olivia Omar Otto Owen Pablo Pamela Patricia Patrick Pauline Pedro Penelope Petra Philip Phoebe Polly Priya
    Quentin Rachel Ralph Raymond Rebecca Richard Rita Robert Robin Roger Ronald Rory Rosemary Roy Rupert Sandra
    Sara Sarah Scott Sebastian Selma Sharon Sheila Sidney Silvia Simon Sofia Sonia Sophie Stanley Stella Stephen
    Stuart Susan Sven Sylvia Tamara Tanya Teresa Thea Theodore Theresa Thomas Timothy Toby Tony Tracy Trevor
    Ulrich Ursula Valerie Vanessa Victor Victoria Vincent Viola Violet Walter Wanda Wendy Wilfred William Winston
    Xavier Yasmin Yusuf Zachary Zelda""".split()  # noqa: SIM905
)
SURNAMES = tuple(
    """Adams Allen Anderson Archer Bailey Baker Barnes Bell Bennett Berg Black Brooks Brown Burton Butler Campbell
    Carter Chapman Chen Clark Cole Collins Cook Cooper Costa Cox Davies Dean Diaz Dixon Dubois Edwards Ellis Evans
    Fischer Fisher Fletcher Ford Foster Fox Fraser Garcia Gibson Gomez Gray Green Griffin Gupta Hall Hansen Harper
    Harris Hart Harvey Hayes Hill Hoffman Holmes Howard Hughes Hunt Hunter Ivanov Jackson James Jensen Johnson
    Jones Kaur Kelly Khan Kim King Klein Knight Kumar Lambert Larsen Lee Lewis Lindgren Lopez Lovelace Marsh
    Marshall Martin Martinez Mason Meyer Miller Mills Mitchell Moore Morgan Morris Moreau Murphy Murray Nelson
    Newman Nguyen Novak Olsen Owens Palmer Park Parker Patel Perez Perry Petrov Phillips Pierce Porter Powell
    Price Reed Reid Richards Rivera Roberts Robinson Rogers Rossi Russell Ryan Sanchez Sanders Sato Schmidt Scott
    Shaw Silva Simpson Smith Stone Suzuki Tanaka Taylor Thompson Torres Tucker Turing Turner Wagner Walker Wallace
    Ward Warren Watson Weber Webb Wells West White Williams Wilson Wood Wright Yamada Young""".split()  # noqa: SIM905
)
MORE_CITIES = tuple(
    """Aberdeen Accra Adelaide Algiers Amman Amsterdam Ankara Antwerp Atlanta Auckland Baghdad Baku Baltimore Bamako
    Barcelona Beirut Belfast Belgrade Bergen Bilbao Birmingham Bologna Bordeaux Brasilia Bremen Brighton Brisbane
    Bristol Brno Bruges Brussels Bucharest Budapest Cadiz Calgary Cambridge Canberra Caracas Cardiff Casablanca
    Charlotte Chester Cleveland Cologne Columbus Copenhagen Cordoba Cork Dakar Damascus Darwin Detroit Dhaka Doha
    Dortmund Dresden Dubai Dundee Durban Edinburgh Eindhoven Essen Exeter Florence Frankfurt Freiburg Galway
    Gdansk Genoa Ghent Glasgow Granada Graz Grenoble Guadalajara Hanoi Hanover Harare Helsinki Hobart Honolulu
    Houston Innsbruck Istanbul Izmir Johannesburg Kabul Kampala Karachi Kathmandu Kingston Kigali Kobe Krakow
    Lahore Lausanne Leeds Leipzig Leicester Lille Limerick Linz Liverpool Ljubljana Luanda Lucerne Lusaka
    Luxembourg Malaga Malmo Managua Manchester Manila Maputo Marseille Medellin Melbourne Memphis Mexico
    Minneapolis Minsk Modena Mombasa Monaco Montevideo Montreal Muscat Nagoya Nantes Naples Nashville Newcastle
    Norwich Nottingham Nuremberg Odense Orlando Ottawa Oxford Palermo Panama Parma Perth Philadelphia Phoenix Pisa
    Portland Porto Quebec Ravenna Recife Reykjavik Riga Rio Riyadh Rotterdam Salzburg Santiago Santander Sapporo
    Sarajevo Sheffield Shanghai Singapore Skopje Sofia Southampton Split Stavanger Stockholm Strasbourg Stuttgart
    Swansea Taipei Tallinn Tampere Tangier Tbilisi Tehran Tirana Toledo Toulouse Trieste Tripoli Trondheim Tunis
    Turin Turku Uppsala Utrecht Valencia Vancouver Venice Verona Vilnius Washington Wellington Winnipeg Wroclaw
    Yerevan Zagreb""".split()  # noqa: SIM905
)
# The tools of everyday requests, by their place in TOOLS.
PLAIN_TOOLS = (0, 1, 2, 4, 6, 8, 11, 12, 14, 16, 17, 20)

# By the tool's place in TOOLS; they join its own phrasings, and the last ones are held out.
MORE_TOOL_ASKS: dict[int, tuple[str, ...]] = {
    0: (
        "What will the weather be in {0}?",
        "How warm is it in {0}?",
        "Give me the weather for {0}.",
        "Weather for {0}?",
    ),
    1: ("Give me the time in {0}.", "What is the current time in {0}?", "Which time is it in {0}?"),
    2: ("add {0} and {1}", "Can you add {0} and {1}?", "Compute {0} plus {1}.", "How much is {0} + {1}?"),
    3: (
        "multiply {0} by {1}",
        "How much is {0} * {1}?",
        "Please multiply {0} by {1}.",
        "Can you multiply {0} and {1}?",
    ),
    6: ("Start a {0} minute timer.", "I need a timer for {0} minutes.", "Set the timer to {0} minutes."),
    7: ("What is the price of {0} stock?", "Show me the share price of {0}.", "How much is a share of {0}?"),
    14: ("Find {0} in my contacts.", "Find the contact of {0}.", "Look up the contact {0}."),
    20: ("Throw a {0} sided die.", "Roll a die with {0} faces.", "Can you roll a {0} sided die?"),
    21: ("Please delete {0}.", "delete the file {0}", "Please remove the file {0}."),
    22: ("Show {0}.", "Read {0} to me.", "Please open the file {0}."),
}
